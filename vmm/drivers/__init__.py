"""The drivers: one package each, with the driver's facts in its `__init__`. `vmm.driver.DRIVERS` lists them."""
