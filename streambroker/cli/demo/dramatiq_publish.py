"""The publisher of the demo for Dramatiq, a process of its own: sends messages as any web application would."""

from __future__ import annotations

from dramatiq import group, pipeline

from . import ledger, plan
from .dramatiq_app import broker, flaky, work


def publish(story: plan.Story) -> None:
    runs = [(run, plan.seconds(run)) for run in story.runs]
    first = runs[0]
    if story.kind == "delay":
        work.send(*first)
    elif story.kind == "countdown":
        work.send_with_options(args=first, delay=int(story.countdown * 1000))
    elif story.kind == "retry":
        flaky.send(*first)
    elif story.kind == "chain":
        pipeline([work.message_with_options(args=run, pipe_ignore=True) for run in runs]).run()
    else:
        group([work.message(*run) for run in runs]).run()
    ledger.write("published", *story.runs)


if __name__ == "__main__":
    for story in plan.stories("dramatiq"):
        publish(story)
    broker.close()
