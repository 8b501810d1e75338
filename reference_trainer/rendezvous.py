"""Where the ranks of an attempt meet after torchrun has restarted them."""

import os

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from reference_trainer.placement import Placement

KEY = "reference_trainer/attempt"


def open_fresh_store(placement: Placement) -> TCPStore:
    """Return a store of this attempt alone; every rank must call this.

    The store of torchrun outlives the attempts, and gloo may find in it the addresses of ranks that are gone. So all it
    tells here is where the new one is, which rank 0 serves.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    launcher = TCPStore(host, port, is_master=False, wait_for_workers=False)
    key = f"{KEY}-{os.environ.get('TORCHELASTIC_RUN_ID', '')}-{placement.attempt}"
    if placement.rank == 0:
        store = TCPStore(host, 0, world_size=placement.world_size, is_master=True, wait_for_workers=False)
        launcher.set(key, str(store.port))
        return store
    port = int(launcher.get(key))
    return TCPStore(host, port, world_size=placement.world_size, is_master=False, wait_for_workers=False)
