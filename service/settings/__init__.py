"""Every setting, where it comes from, and the values that settings are made of."""
