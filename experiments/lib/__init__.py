"""What the studies share: problems, arms, runs that are kept, a pool of processes, intervals.

    problems   a small task with its tokenizer, its model and the start that all arms share
    arms       whom the learner takes for the sampler, and what it does about the difference
    runs       one job: train from the start of a seed, evaluate, keep one row; a kept row is not made again
    grid       jobs of a study: a learning rate is chosen for every arm on seeds that are not reported
    intervals  t intervals of means and of paired differences
    files      rows in, rows out, in one move

A study is a script in experiments/ that says which arms, problems, samplers and seeds it wants, and what it found.
"""
