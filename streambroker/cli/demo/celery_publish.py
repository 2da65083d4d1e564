"""The publisher of the demo for Celery, a process of its own: calls the tasks as any web application would."""

from __future__ import annotations

from celery import chain, chord, group

from . import ledger, plan
from .celery_app import flaky, total, work


def publish(story: plan.Story) -> None:
    runs = [(run, plan.seconds(run)) for run in story.runs]
    first = runs[0]
    if story.kind == "delay":
        work.delay(*first)
    elif story.kind == "countdown":
        work.apply_async(first, countdown=story.countdown)
    elif story.kind == "retry":
        flaky.delay(*first)
    elif story.kind == "chain":
        chain(*(work.si(*run) for run in runs)).delay()
    elif story.kind == "group":
        group(work.s(*run) for run in runs).delay()
    else:
        chord(work.s(*run) for run in runs[:-1])(total.s(story.runs[-1]))
    ledger.write("published", *story.runs)


if __name__ == "__main__":
    for story in plan.stories("celery"):
        publish(story)
