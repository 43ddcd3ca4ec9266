"""Proofs and doctors: the machine, the bandwidth, the training itself."""
