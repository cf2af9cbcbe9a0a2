"""The launcher role: a program such as mpirun runs on one worker only, and the other workers run its commands."""
