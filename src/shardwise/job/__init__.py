"""The job: tensors of a source side become tensors of a target side; agreed, planned, run, verified."""
