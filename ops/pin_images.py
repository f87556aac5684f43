"""Write into .env the digests of the images that Compose takes from a registry, so that it takes these and no others.

A tag such as `postgres:17` may mean another image tomorrow; a digest cannot. Compose files name each image as
`${POSTGRES_IMAGE:-postgres:17}`. Run it again to take the images that the tags mean by then.
"""

import json
import re
import subprocess
import sys
from pathlib import Path


def main(compose_files: list[str]) -> int:
    """Pull every image, and write its digest.

    Args:
        compose_files: The Compose files that name the images.

    Returns:
        The exit code: 1 if an image cannot be pulled or has no digest; .env then stays as it is.
    """
    tags = dict(
        found
        for path in compose_files
        for found in re.findall(r"\$\{(\w+_IMAGE):-([^}]+)\}", Path(path).read_text(encoding="utf-8"))
    )
    digests = {}
    for variable, tag in sorted(tags.items()):
        pulled = subprocess.run(["docker", "pull", "--quiet", tag], check=False, stdout=subprocess.DEVNULL)  # noqa: S603, S607
        if pulled.returncode:
            sys.stderr.write(f"{tag} could not be pulled; nothing is pinned\n")
            return 1
        inspected = subprocess.run(  # noqa: S603
            ["docker", "image", "inspect", "--format", "{{json .RepoDigests}}", tag],  # noqa: S607
            check=True,
            stdout=subprocess.PIPE,
        )
        repository = tag.rpartition(":")[0]
        known = [each for each in json.loads(inspected.stdout) or [] if each.startswith(f"{repository}@")]
        if not known:
            sys.stderr.write(f"{tag} was built here and has no digest of a registry; nothing is pinned\n")
            return 1
        digests[variable] = known[0].replace(repository, tag, 1)
    environment = Path(".env")
    lines = environment.read_text(encoding="utf-8").splitlines() if environment.exists() else []
    lines = [line for line in lines if line.partition("=")[0] not in digests]
    lines += [f"{variable}={image}" for variable, image in digests.items()]
    part = Path(".env.part")
    part.touch(mode=0o600)
    part.write_text("\n".join(lines) + "\n", encoding="utf-8")
    part.replace(environment)
    sys.stdout.write("".join(f"{variable}={image}\n" for variable, image in digests.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
