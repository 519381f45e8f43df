"""Other CPUs: probes and audits of small bundles as on CPUs that this machine does not have."""
