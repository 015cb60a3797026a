"""A functional model zoo in Equinox whose models run across devices by explicit collectives."""
