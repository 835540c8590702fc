"""Pre-flight: compiles training steps for TPUs that are not there."""
