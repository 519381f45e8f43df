"""Support: fakes, small models and small bundles that several test files share."""
