"""Lesson 4: save, stop, and go on with another number of ranks and another stage.

Run:  shardwise launch --ranks 2 examples/04_resume_anywhere.py --stage 3 --until 100
      shardwise launch --ranks 4 examples/04_resume_anywhere.py --stage 1 --until 200
      python examples/04_resume_anywhere.py --until 300

A checkpoint holds whole tensors under the model's own names; nothing in it says how it was cut.
"""

import argparse
import importlib

import torch

import shardwise

lesson_1 = importlib.import_module("01_one_process")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--until", "--steps", type=int, default=100)
    parser.add_argument("--stage", type=int, default=0)
    parser.add_argument("--folder", default="runs/resume_anywhere")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    config = {
        "zero": {"stage": arguments.stage},
        "optimizer": {"type": "adamw", "lr": 3e-3},
        "checkpoint": {"keep_last": 2},
    }
    engine = shardwise.initialize(lesson_1.Model(), config)
    rank, ranks = engine.world.rank, engine.world.size
    found = engine.load(arguments.folder, required=False)  # the newest whole step; None if there is none yet
    if rank == 0:
        print("a new run" if found is None else f"going on after step {engine.step_count}: {found['note']}")
    while engine.step_count < arguments.until:
        result = engine.train_step([lesson_1.batch(engine.step_count, rank, ranks)])
        if result.step % 50 == 0 or result.step == arguments.until:
            engine.save(arguments.folder, {"note": f"saved by {ranks} ranks at stage {arguments.stage}"})
            if rank == 0:
                print(f"step {result.step:4}  loss {result.loss:.5f}  saved")
    engine.close()  # waits for the save that runs behind


if __name__ == "__main__":
    main()
