"""Address of the store on the hosts of an MPI job, which MPI's variables do not name: exchanged by mpi4py."""

from collections.abc import Callable

from shardwise.base.errors import ConfigError


def broadcast_address(rank: int, choose: Callable[[], str]) -> str:
    """Return the address that rank 0 chooses; all ranks make this call.

    Args:
        rank: This rank.
        choose: Function that returns the address, called on rank 0.

    Raises:
        ConfigError: on all ranks, if rank 0 has no such address; or if mpi4py does not load.
    """
    try:
        from mpi4py import MPI
    except (
        ImportError,
        RuntimeError,
    ) as error:  # it loads the MPI library of the host, which may be another one
        raise ConfigError(
            f"MPI: the ranks would exchange the first host's address by mpi4py, which does not load here: {error}. Set "
            "MASTER_ADDR to that address (mpirun -x MASTER_ADDR=...), or repair mpi4py (MPI4PY_MPIABI chooses between "
            "libraries)"
        ) from None
    found = ("", "")
    if rank == 0:
        try:
            found = (choose(), "")
        except ConfigError as error:
            found = ("", str(error))
    address, refusal = MPI.COMM_WORLD.bcast(found, root=0)
    if refusal:
        raise ConfigError(str(refusal))
    return str(address)
