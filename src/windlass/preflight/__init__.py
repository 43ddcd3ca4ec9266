"""The check of machine, packages, disks and interconnect before a training."""
