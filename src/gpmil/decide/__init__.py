"""From probabilities to decisions: metrics, calibration, marks at a rate, refer rules."""
