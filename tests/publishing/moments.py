"""The moments of a pull at which a test lets something happen to a rank."""

import os

import shardwise as sw
from shardwise.job.job import Job
from shardwise.job.mapped import MappedJob
from shardwise.publishing.client import Client
from shardwise.publishing.subscriber import Subscriber

# By the function that is called then. Jobs of other hosts than the publisher's are sent a version, others map it.
TOLD = Subscriber, "_answer"  # it may begin
COPYING = MappedJob, "_views"  # tensor by tensor
RECEIVING = Job, "_moves_of"  # the tensors of a bucket
ARRIVED = Client, "confirm"  # on the first rank


def at_moment(owner, name, sign, *, rank=0, call=1):
    """What prepares a job: at a call of that function, a rank sends itself a signal."""

    def prepare(me):
        function, me.calls = getattr(owner, name), 0

        def wrapped(*args, **kwargs):
            me.calls += 1
            if me.rank == rank and me.calls == call:
                os.kill(os.getpid(), sign)
            return function(*args, **kwargs)

        setattr(owner, name, wrapped)

    return prepare


def pull(me):
    """A pull, and what is in the cells afterwards, whether it failed or not."""
    try:
        return me.subscriber.pull(), me.weights.step(), None
    except sw.ShardwiseError as error:
        return None, me.weights.step(), str(error)


def drops(trainer):
    """The log of subscribers that were given up."""
    return [line for line in trainer.log() if "is dropped" in line]
