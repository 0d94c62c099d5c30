"""Whether the machines, the network and the folders of a job are fit for training, before any training."""
