"""What controller, launcher, ranks and client say to each other: every name and every form that two of them share.

`variables` names the environment variables, `failures` how ranks end, `requests` what launchers ask the rendezvous
service, `reports` what ranks and launchers report to it, and `local` what a rank and its launcher say to each other.
`codec` turns all of these into JSON and back.

A launcher may be older or newer than its controller. A new field therefore needs a default that stands for what the
older side means by leaving the field out, and no field ever changes its name or its type.
"""
