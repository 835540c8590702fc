"""For `check` and `preflight`: runs a script in a process of its own, with changed trainers; nothing is saved."""
