"""Shared by the studies: problems, arms, runs, a grid of learning rates, intervals, files.

    problems     small tasks with a tokenizer, a model and a shared start
    arms         the learners that the studies compare
    samplers     eviction policies with a budget and a buffer
    starts       supervised parameters that all arms of a seed share
    runs         one job: train from the start of a seed, evaluate, save one row; saved rows are reused
    grid         all jobs of a study; chooses a learning rate for every arm on pilot seeds
    command      the command line of a study
    intervals    t intervals of means and of paired differences
    files        rows in, rows out, in one move
    provenance   date, command, commit, versions and CPU of a result

A study is a script in experiments/ that lists its arms, problems, samplers and seeds.
"""
