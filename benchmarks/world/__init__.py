"""One synthetic world with a known true reward: what every method makes of the same budget of samples (`make world`)."""
