"""What a user can do: each act is a function that takes values, returns values and raises errors.

The command line, the Python API and the dashboard call the same functions. None of them prints or asks: what they have
to report while they run goes to an `Observer`.
"""
