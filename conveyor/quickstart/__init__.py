"""From nothing to a model that RLHF has made better, in a few minutes on two cores: `conveyor quickstart`."""
