"""A stand-in for SGLang, on CPUs, with the names that the microscope uses."""
