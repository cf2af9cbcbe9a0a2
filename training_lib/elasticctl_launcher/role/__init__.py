"""The launcher role: a program such as mpirun runs once, on one worker, and the others run what it tells them."""
