"""The first run on a cluster (``flexcp accept``): checks of everything that flexcp assumes about it, on all ranks."""
