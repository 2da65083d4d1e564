"""Judge a store and a framework by minutes of work under disturbance.

Three workers and two producers run on a real server, each behind a proxy of its own. Meanwhile workers are killed
(SIGKILL), deployed (SIGTERM, then the next one), frozen (SIGSTOP) for longer than their lease; links are cut, refused
or hang for longer than the lease; the store, which syncs every write to its disk, is killed or stopped and comes back.
Jobs are plain, delayed, retried, prioritised, large, oversized (the publisher must refuse them) and poison (they kill
whoever runs them until they become dead letters). --seed decides what happens when; every disturbance is printed as it
happens.

What ran is in a ledger outside of the store. The verdict names
  lost         confirmed to its publisher, neither ended nor a dead letter
  early        started before its time
  doubled      started twice, each with its cause: kill, cut, restart (of the store) or lost lease, when that hit the
               worker or the store during the first run, or kept the second worker away from the store, which had the
               job before; poison, when the job itself killed its worker; unexplained otherwise
  late         started more than the lease and 5 s after its time, with how much
  unknown      its publishing raised: it may run once or not at all, and is counted apart
  left         what the store has over its base when all is done and all are gone
  memory       of each worker's processes that lived long enough, at start and end

Exit code 0 only when nothing is lost, early, doubled without a cause or left, no job ran that nobody has published, no
oversized one was accepted, no dead letter but poison is there, all clean stops ended and no worker has grown; otherwise
1, and logs and ledger are kept in a folder that is printed.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
from pathlib import Path

from integration.soak.report import as_json, as_text
from integration.soak.run import Options, Soak

_SERVERS = {"redis": "valkey", "jetstream": "nats"}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m integration.soak", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=list(_SERVERS), required=True)
    parser.add_argument("--framework", choices=("celery", "dramatiq"), required=True)
    parser.add_argument("--minutes", type=float, default=10.0, help="of disturbance (default: 10)")
    parser.add_argument("--seed", type=int, help="the same one makes the same jobs and the same plan (default: any)")
    parser.add_argument("--rate", type=float, default=6.0, help="jobs published a second (default: 6)")
    parser.add_argument("--lease", type=float, default=10.0, help="seconds (default: 10)")
    parser.add_argument("--server", help="kind of server, say redis62 or nats210 (default: valkey, nats)")
    parser.add_argument("--keep", action="store_true", help="logs and ledger, also when all is well")
    parser.add_argument("--json", action="store_true", help="the verdict as JSON")
    args = parser.parse_args()
    seed = random.SystemRandom().randrange(10_000) if args.seed is None else args.seed
    options = Options(args.engine, args.framework, args.minutes, seed, args.server or _SERVERS[args.engine],
                      rate=args.rate, lease=args.lease)
    folder = Path(tempfile.mkdtemp(prefix="sb-soak-"))
    print(f"{args.engine} and {args.framework}, {args.minutes:g} minutes, --seed {seed}, logs in {folder}",
          file=sys.stderr, flush=True)
    verdict = Soak(options, folder).run()
    print(json.dumps({**as_json(verdict), "seed": seed}, indent=1) if args.json else as_text(verdict))
    if args.keep or verdict.faults:
        print(f"logs and ledger: {folder}", file=sys.stderr)
    else:
        shutil.rmtree(folder)
    return 1 if verdict.faults else 0


sys.exit(main())
