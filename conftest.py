"""Eight simulated devices for every test; the one place in the suite that sets them up, before jax is imported."""

from jaxpar.simulate import simulate_devices

simulate_devices(8)
