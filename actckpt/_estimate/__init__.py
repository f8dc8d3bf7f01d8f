"""Steps that run on tensors without bytes: what they would hold and take on a device that is not there."""
