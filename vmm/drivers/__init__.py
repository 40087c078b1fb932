"""One module a driver; `vmm.driver.load_driver` imports them by name."""
