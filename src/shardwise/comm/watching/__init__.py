"""The watch over the ranks of a job: records of what each rank does, and the verdict on who keeps others waiting."""
