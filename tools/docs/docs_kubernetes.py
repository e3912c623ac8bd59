"""Renders the overlays of deploy/kubernetes and holds every object to the schemas of Kubernetes.

    .venv-docs/bin/python tools/docs/docs_kubernetes.py [OVERLAY ...] [--json] [--plain FILE]

Laws: this is no kustomize. It knows the fields that our files use (resources, namespace, images, configMapGenerator
with files and without suffixes, patches of whole files merged by name) and refuses any other, so that it can never
render something else than `kubectl kustomize` does because it looked away. Schemas are those that `kubernetes-validate`
brings, the strict ones: a field that nobody knows is an error. Status 0 if all is well.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
VERSIONS = ("1.30", "1.37")  # the oldest that has native sidecars by default for sure, and the newest there is
FIELDS = {
    "apiVersion", "kind", "namespace", "resources", "images", "configMapGenerator", "generatorOptions", "patches",
}  # fmt: skip
MERGED_BY = {**dict.fromkeys(("containers", "initContainers", "env", "volumes"), "name"), "volumeMounts": "mountPath"}
REPLACED = {"tolerations", "args", "command"}
CLUSTER_WIDE = {"Namespace"}

Object = dict[str, Any]


class KustomizeError(Exception):
    """What this cannot render."""


def render(folder: Path) -> list[Object]:
    """The objects of a kustomization, in order."""
    config = _documents(folder / "kustomization.yaml")[0]
    unknown = sorted(set(config) - FIELDS)
    if unknown:
        raise KustomizeError(f"{folder.name}: {unknown[0]} is not known here")
    found: list[Object] = []
    for name in config.get("resources", ()):
        path = folder / name
        found += render(path) if path.is_dir() else _documents(path)
    found += [_config_map(folder, made, config) for made in config.get("configMapGenerator", ())]
    for patch in config.get("patches", ()):
        if set(patch) != {"path"}:
            raise KustomizeError(f"{folder.name}: patches are files")
        for change in _documents(folder / patch["path"]):
            _patch(found, change)
    for one in found:
        if "namespace" in config and one["kind"] not in CLUSTER_WIDE:
            one["metadata"]["namespace"] = config["namespace"]
        for image in config.get("images", ()):
            _tag(one, image)
    return found


def _documents(path: Path) -> list[Object]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the same in C, where it was built
    return [document for document in yaml.load_all(path.read_text(), loader) if document is not None]


def _config_map(folder: Path, made: Object, config: Object) -> Object:
    if set(made) != {"name", "files"} or config.get("generatorOptions") != {"disableNameSuffixHash": True}:
        raise KustomizeError(f"{folder.name}: configMapGenerator takes files, without suffixes")
    data = {Path(name).name: (folder / name).read_text() for name in made["files"]}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": made["name"]}, "data": data}


def _patch(objects: list[Object], change: Object) -> None:
    for one in objects:
        if one["kind"] == change["kind"] and one["metadata"]["name"] == change["metadata"]["name"]:
            _merge(one, change)
            return
    raise KustomizeError(f"patch of {change['kind']} {change['metadata']['name']}, which is not there")


def _merge(into: Object, change: Object) -> None:
    for key, value in change.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        elif isinstance(value, list) and key in into and key not in REPLACED:
            if key not in MERGED_BY:
                raise KustomizeError(f"patch of the list {key}, by which field is not known here")
            _merge_list(into[key], value, MERGED_BY[key])
        else:
            into[key] = value


def _merge_list(into: list[Object], change: list[Object], by: str) -> None:
    for value in change:
        same = next((each for each in into if each[by] == value[by]), None)
        if same is None:
            into.append(value)
        else:
            _merge(same, value)


def _tag(one: Object, image: Object) -> None:
    if set(image) - {"name", "newName", "newTag"}:
        raise KustomizeError(f"images: {sorted(image)}")
    for container in containers(one):
        if container["image"].partition(":")[0] == image["name"]:
            container["image"] = f"{image.get('newName', image['name'])}:{image['newTag']}"


def containers(one: Object) -> Iterator[Object]:
    pod = one.get("spec", {}).get("template", {}).get("spec", {})
    yield from pod.get("initContainers", ())
    yield from pod.get("containers", ())


def problems(one: Object) -> list[str]:
    """What the schemas say against an object. Most are the same in all overlays, and a schema takes a while to load."""
    return _problems(json.dumps(one))


@functools.cache
def _problems(text: str) -> list[str]:
    one = json.loads(text)
    name = f"{one.get('kind')}/{one.get('metadata', {}).get('name')}"
    found = []
    for version in VERSIONS:
        try:
            kubernetes_validate.validate(one, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            found.append(f"{name}: {'.'.join(str(part) for part in error.path)}: {error.message} ({version})")
        except (kubernetes_validate.SchemaNotFoundError, kubernetes_validate.InvalidSchemaError) as error:
            found.append(f"{name}: {error} ({version})")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Render and check the Kubernetes manifests.")
    parser.add_argument("overlay", nargs="*", help="folders with a kustomization; all overlays if none is named")
    parser.add_argument("--plain", metavar="FILE", help="print the objects of a file as JSON: no schema is here for it")
    parser.add_argument("--json", action="store_true", help="print the objects of each overlay as one JSON object")
    args = parser.parse_args()
    if args.plain:
        print(json.dumps(_documents(Path(args.plain))))
        return 0
    folders = [Path(name) for name in args.overlay] or sorted((FOLDER / "overlays").iterdir())
    rendered: dict[str, list[Object]] = {}
    said: list[str] = []
    for folder in folders:
        try:
            rendered[folder.name] = render(folder)
            said += [f"{folder.name}: {each}" for one in rendered[folder.name] for each in problems(one)]
        except (KustomizeError, OSError, yaml.YAMLError) as error:
            said.append(f"{folder.name}: {error}")
    if args.json:
        print(json.dumps(rendered))
    for each in said:
        print(each, file=sys.stderr)
    if not args.json:
        print("\n".join(f"{name}: {len(objects)} objects" for name, objects in rendered.items()))
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
