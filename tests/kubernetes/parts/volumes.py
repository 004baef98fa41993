"""The volumes of a pod as folders: ConfigMap, Secret, emptyDir, projected, downward API.

Lives here: reading the objects and laying the files the way a kubelet does. Never here: mounting them.
Invariant: a reader sees either all old or all new files of a volume (`..data` is swapped by one rename).
"""

import base64
import datetime
import pathlib

from api import ApiError

MODE = 0o644
TOKEN_SECONDS = 3607


class Volumes:
    """All volumes of one pod under `folder`."""

    def __init__(self, api, pod, folder):
        self.api, self.pod, self.folder = api, pod, pathlib.Path(folder)
        self.laid = {}
        self.tokens = {}

    def lay(self):
        """Lays every volume; raises `ApiError` while an object that is not optional is missing."""
        for volume in self.pod["spec"].get("volumes", []):
            target = self.path(volume["name"])
            target.mkdir(parents=True, exist_ok=True)
            if "emptyDir" in volume:
                target.chmod(0o777)
                continue
            target.chmod(0o755)
            files = self._files(volume)
            if files is None:
                raise ApiError(f"volume {volume['name']}", 0, f"kind not known here: {sorted(volume)}")
            if self.laid.get(volume["name"]) != files:
                _swap(target, files, _mode(volume))
                self.laid[volume["name"]] = files

    def path(self, name):
        return self.folder / name

    def _files(self, volume):
        """{relative path: bytes}, or None for a kind that is not known here."""
        if "configMap" in volume:
            return self._config_map(volume["configMap"], volume["configMap"].get("name"))
        if "secret" in volume:
            return self._secret(volume["secret"], volume["secret"].get("secretName"))
        if "downwardAPI" in volume:
            return self._downward(volume["downwardAPI"])
        if "projected" in volume:
            files = {}
            for source in volume["projected"].get("sources", []):
                if "configMap" in source:
                    files.update(self._config_map(source["configMap"], source["configMap"].get("name")))
                elif "secret" in source:
                    files.update(self._secret(source["secret"], source["secret"].get("name")))
                elif "downwardAPI" in source:
                    files.update(self._downward(source["downwardAPI"]))
                elif "serviceAccountToken" in source:
                    files.update(self._token(source["serviceAccountToken"]))
            return files
        return None

    def _object(self, kind, source, name):
        namespace = self.pod["metadata"]["namespace"]
        try:
            return self.api.get(f"/api/v1/namespaces/{namespace}/{kind}/{name}")
        except ApiError as error:
            if error.status == 404 and source.get("optional"):
                return {}
            raise

    def _config_map(self, source, name):
        found = self._object("configmaps", source, name)
        data = {key: text.encode() for key, text in found.get("data", {}).items()}
        data.update({key: base64.b64decode(text) for key, text in found.get("binaryData", {}).items()})
        return _items(source, data)

    def _secret(self, source, name):
        found = self._object("secrets", source, name)
        return _items(source, {key: base64.b64decode(text) for key, text in found.get("data", {}).items()})

    def _downward(self, source):
        return {item["path"]: field(self.pod, item["fieldRef"]["fieldPath"]).encode()
                for item in source.get("items", []) if "fieldRef" in item}

    def _token(self, source):
        key = (source["path"], source.get("audience"))
        if key not in self.tokens:
            meta, spec = self.pod["metadata"], self.pod["spec"]
            body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest",
                    "spec": {"expirationSeconds": source.get("expirationSeconds", TOKEN_SECONDS),
                             "audiences": [source["audience"]] if source.get("audience") else [],
                             "boundObjectRef": {"apiVersion": "v1", "kind": "Pod", "name": meta["name"],
                                                "uid": meta["uid"]}}}
            path = (f"/api/v1/namespaces/{meta['namespace']}/serviceaccounts/"
                    f"{spec.get('serviceAccountName', 'default')}/token")
            self.tokens[key] = self.api.post(path, body)["status"]["token"].encode()
        return {source["path"]: self.tokens[key]}


def field(pod, path):
    """The downward API's value of one field path, as text."""
    for group in ("labels", "annotations"):
        if path.startswith(f"metadata.{group}['"):
            return pod["metadata"].get(group, {}).get(path.split("'")[1], "")
        if path == f"metadata.{group}":
            pairs = pod["metadata"].get(group, {})
            return "\n".join(f'{key}="{pairs[key]}"' for key in sorted(pairs))
    if path == "status.podIPs":
        return pod.get("status", {}).get("podIP", "")
    value = pod
    for part in path.split("."):
        value = value.get(part, "") if isinstance(value, dict) else ""
    return str(value)


def timestamp():
    """The time as the API writes it."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _items(source, data):
    if "items" not in source:
        return data
    return {item["path"]: data[item["key"]] for item in source["items"] if item["key"] in data}


def _mode(volume):
    kind = next((volume[kind] for kind in ("configMap", "secret", "projected", "downwardAPI") if kind in volume), {})
    return kind.get("defaultMode", MODE)


def _swap(target, files, mode):
    number = 1 + max((int(old.name[3:]) for old in target.glob("..v*")), default=0)
    fresh = target / f"..v{number}"
    fresh.mkdir()
    for name, data in files.items():
        path = fresh / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        # group and other may read: the owner here is root, while the container's user is not
        path.chmod(mode | 0o044)
    link = target / "..data.new"
    link.unlink(missing_ok=True)
    link.symlink_to(fresh.name)
    link.rename(target / "..data")
    tops = {name.split("/")[0] for name in files}
    for top in tops:
        if not (target / top).is_symlink():
            (target / top).symlink_to(f"..data/{top}")
    for old in target.iterdir():
        if not old.name.startswith("..") and old.name not in tops:
            old.unlink()
