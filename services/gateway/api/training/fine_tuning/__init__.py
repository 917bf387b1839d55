"""OpenAI's /v1/fine_tuning: jobs over uploaded files, as a translation over training jobs."""
