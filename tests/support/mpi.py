"""An MPI program for the library that Debian's mpirun comes with, without a compiler."""

from __future__ import annotations

SUM_OF_RANKS = """
import ctypes, os
mpi = ctypes.CDLL("libmpi.so.40", mode=ctypes.RTLD_GLOBAL)
def named(name):
    return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(mpi, name)))
assert mpi.MPI_Init(None, None) == 0
world, rank, total = named("ompi_mpi_comm_world"), ctypes.c_int(), ctypes.c_int()
mpi.MPI_Comm_rank(world, ctypes.byref(rank))
mpi.MPI_Allreduce(ctypes.byref(rank), ctypes.byref(total), 1, named("ompi_mpi_int"), named("ompi_mpi_op_sum"), world)
mpi.MPI_Finalize()
os.write(1, f"rank {rank.value} on {os.environ['ELASTICCTL_WORKER']}: {total.value}\\n".encode())
"""
"""Each rank prints `rank R on WORKER: SUM`, the sum of all ranks' numbers."""
