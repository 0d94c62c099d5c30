"""Random draws, run sharded and plainly: the numbers must be equal. Four campaigns share one way.

draws.py      what may be drawn: strategies of hypothesis
campaign.py   run draws
notes.py      what runs have noted, compared
training.py   what runs of settings and of strategies have in common
blocks.py     their models, precisions and placements

test_settings_campaign.py   fully_shard: meshes, settings, calls between microbatches
test_strategy_campaign.py   shard_model: strategies, overrides, contexts
test_state_campaign.py      saving and loading, from one way of sharding to the next
test_programs.py            kinds of modules and calls of autograd; emulated rank by rank, where plain training is
                            not one process (program.py, modules.py, actor.py)
"""
