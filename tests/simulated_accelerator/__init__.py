"""An accelerator for tests on hosts without one: a backend of torch named `sim`. See README.md."""
