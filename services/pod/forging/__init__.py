"""The forge in a pod: an engine that evaluates forged models, forge jobs, and the processes of `temper forge`."""
