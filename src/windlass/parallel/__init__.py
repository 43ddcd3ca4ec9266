"""Many ranks as one training: their environment, mesh and collectives, and a model's division."""
