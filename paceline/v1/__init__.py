"""Wire types and service stubs of package paceline.v1, generated from proto/ by `make proto`."""
