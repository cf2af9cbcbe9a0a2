"""Scenarios in which everything happens to a storage URL: `scenario` draws and runs them.

`places` are where it is, `damages` what is done to its files, `lies` what it answers; `world` says what must hold.
"""
