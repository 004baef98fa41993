"""A Kubernetes control plane as plain processes: etcd, kube-apiserver, kube-controller-manager.

Lives here: certificates, flags, readiness. Never here: nodes, pods and what runs in them (`node.py`), gateways.
Invariant: RBAC and Pod Security admission are on, as in a production cluster; only the store is faster (no fsync).
"""

import base64
import json
import os
import pathlib
import secrets
import shutil
import subprocess
import urllib.request

from api import Api
from processes import Child, StartError, free_port

ADMIN = "parts-admin"
SERVICE_RANGE = "10.78.0.0/16"
KUBERNETES_SERVICE = "10.78.0.1"
# Controllers that give a cluster its meaning; those that need a cloud, a real node or a metrics API stay off.
CONTROLLERS = ("namespace-controller", "serviceaccount-controller", "root-ca-certificate-publisher-controller",
               "deployment-controller", "replicaset-controller", "statefulset-controller", "daemonset-controller",
               "job-controller", "garbage-collector-controller", "endpointslice-controller", "endpoints-controller",
               "disruption-controller", "resourcequota-controller", "clusterrole-aggregation-controller",
               "ttl-after-finished-controller", "horizontal-pod-autoscaler-controller",
               "validatingadmissionpolicy-status-controller")


class Cluster:
    """The control plane in `folder`, serving on `address`. A context manager; `stop` ends every process."""

    def __init__(self, folder, programs, address="127.0.0.1", fixed_port=None):
        self.folder = pathlib.Path(folder).resolve()
        self.programs, self.address, self.fixed_port = programs, address, fixed_port
        self.children = []
        self.port, self.etcd_port, self.api, self.token = None, None, None, None
        self.kubeconfig = self.folder / "admin.kubeconfig"
        self.ca = self.folder / "pki" / "ca.crt"

    def __enter__(self):
        return self.start()

    def __exit__(self, *_):
        self.stop()

    def start(self):
        (self.folder / "pki").mkdir(parents=True, exist_ok=True)
        _certificates(self.folder / "pki", self.address)
        self.token = secrets.token_hex(16)
        tokens = self.folder / "pki" / "tokens.csv"
        tokens.touch(mode=0o600)
        tokens.write_text(f'{self.token},{ADMIN},1,"system:masters"\n')
        try:
            self._start_with_retry()
            self._controllers()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self):
        for child in reversed(self.children):
            child.stop()
        self.children.clear()

    def restart_apiserver(self):
        """An outage of some seconds; all history is compacted meanwhile, so a watch from before it gets a 410."""
        old = self._child("kube-apiserver")
        old.stop()
        self.children.remove(old)
        self._compact()
        self._apiserver()

    def _child(self, name):
        return next(child for child in self.children if child.name == name)

    def forget(self, key):
        """Deletes a key of the store behind the API server's back, such as `/registry/pods/NAMESPACE/NAME`."""
        deleted = self._store("deleterange", {"key": base64.b64encode(key.encode()).decode()}).get("deleted")
        if deleted != "1":
            raise StartError(f"etcd: expected to delete {key}, found {deleted or 0} of it")

    def _compact(self):
        newest = self._store("range", {"key": "AA=="})["header"]["revision"]
        self._store("compaction", {"revision": newest, "physical": True})

    def _store(self, path, body):
        request = urllib.request.Request(f"http://127.0.0.1:{self.etcd_port}/v3/kv/{path}", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)

    def _start_with_retry(self):
        # A free port can be taken between the look and the bind: another one is tried.
        for attempt in range(3):
            try:
                return self._etcd_and_apiserver()
            except StartError as error:
                self.stop()
                if "address already in use" not in str(error) or attempt == 2:
                    raise

    def _etcd_and_apiserver(self):
        shutil.rmtree(self.folder / "etcd", ignore_errors=True)
        client, peer = free_port(), free_port()
        self.etcd_port = client
        etcd = Child("etcd", [
            self.programs["etcd"], "--name=parts", f"--data-dir={self.folder / 'etcd'}", "--unsafe-no-fsync",
            f"--listen-client-urls=http://127.0.0.1:{client}", f"--advertise-client-urls=http://127.0.0.1:{client}",
            f"--listen-peer-urls=http://127.0.0.1:{peer}", f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-cluster=parts=http://127.0.0.1:{peer}", "--log-level=warn"], self.folder)
        self.children.append(etcd)
        self.port = self.fixed_port or free_port(self.address)
        self.api = Api(self.address, self.port, self.ca, self.token)
        self._apiserver()
        _write_kubeconfig(self.kubeconfig, self.address, self.port, self.ca, self.token)

    def _apiserver(self):
        apiserver = Child("kube-apiserver", [self.programs["kube-apiserver"], *self._flags(self.etcd_port)],
                          self.folder)
        self.children.append(apiserver)
        apiserver.wait_until(lambda: self.api.get("/readyz") == "ok", 120)

    def _flags(self, etcd_port):
        pki = self.folder / "pki"
        loopback = self.address.startswith("127.")
        return [
            f"--etcd-servers=http://127.0.0.1:{etcd_port}",
            f"--bind-address={self.address}", f"--secure-port={self.port}",
            f"--advertise-address={'192.0.2.1' if loopback else self.address}",
            # On loopback no pod could reach the `kubernetes` Service: loopback addresses are no valid endpoints.
            f"--endpoint-reconciler-type={'none' if loopback else 'lease'}",
            f"--service-cluster-ip-range={SERVICE_RANGE}",
            "--authorization-mode=RBAC", "--allow-privileged=true",
            f"--token-auth-file={pki / 'tokens.csv'}",
            f"--tls-cert-file={pki / 'apiserver.crt'}", f"--tls-private-key-file={pki / 'apiserver.key'}",
            f"--client-ca-file={pki / 'ca.crt'}",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            f"--service-account-key-file={pki / 'sa.pub'}",
            f"--service-account-signing-key-file={pki / 'sa.key'}",
            # No aggregated API server runs here, so nothing needs the aggregator's own certificates.
            "--profiling=false", "--watch-cache=true", "--event-ttl=1h", "-v=1",
        ]

    def _controllers(self):
        pki = self.folder / "pki"
        controllers = Child("kube-controller-manager", [
            self.programs["kube-controller-manager"], f"--kubeconfig={self.kubeconfig}", "--leader-elect=false",
            "--secure-port=0", f"--controllers={','.join(CONTROLLERS)}", f"--root-ca-file={pki / 'ca.crt'}",
            f"--service-account-private-key-file={pki / 'sa.key'}", "--use-service-account-credentials=false",
            "--kube-api-qps=200", "--kube-api-burst=400", "-v=1"], self.folder)
        self.children.append(controllers)
        # The admission of pods needs both: the account that they run as and the bundle mounted into them.
        ready = ("/api/v1/namespaces/default/serviceaccounts/default",
                 "/api/v1/namespaces/default/configmaps/kube-root-ca.crt")
        controllers.wait_until(lambda: all(self.api.get(path) for path in ready), 60)


def _write_kubeconfig(path, address, port, ca, token):
    ca_data = base64.b64encode(pathlib.Path(ca).read_bytes()).decode()
    config = {
        "apiVersion": "v1", "kind": "Config", "current-context": "parts",
        "clusters": [{"name": "parts", "cluster": {"server": f"https://{address}:{port}",
                                                   "certificate-authority-data": ca_data}}],
        "users": [{"name": ADMIN, "user": {"token": token}}],
        "contexts": [{"name": "parts", "context": {"cluster": "parts", "user": ADMIN, "namespace": "default"}}],
    }
    path.touch(mode=0o600)
    path.write_text(json.dumps(config, indent=1))


def _certificates(pki, address):
    """A CA, the server's certificate (X.509 v3: rustls takes no v1) and the service-account key pair."""
    names = ["kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local",
             "localhost"]
    addresses = sorted({"127.0.0.1", address, KUBERNETES_SERVICE})
    san = ",".join([f"DNS:{name}" for name in names] + [f"IP:{ip}" for ip in addresses])
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    _openssl("req", "-x509", *key, "-keyout", pki / "ca.key", "-out", pki / "ca.crt", "-days", "2",
             "-subj", "/CN=parts-ca", "-addext", "basicConstraints=critical,CA:TRUE",
             "-addext", "keyUsage=critical,keyCertSign,cRLSign,digitalSignature")
    _openssl("req", "-x509", *key, "-keyout", pki / "apiserver.key", "-out", pki / "apiserver.crt", "-days", "2",
             "-subj", "/CN=kube-apiserver", "-CA", pki / "ca.crt", "-CAkey", pki / "ca.key",
             "-addext", f"subjectAltName={san}", "-addext", "basicConstraints=critical,CA:FALSE",
             "-addext", "extendedKeyUsage=serverAuth")
    _openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", pki / "sa.key")
    _openssl("ec", "-in", pki / "sa.key", "-pubout", "-out", pki / "sa.pub")


def _openssl(*arguments):
    done = subprocess.run(["openssl", *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, env=dict(os.environ, RANDFILE="/dev/null"))
    if done.returncode != 0:
        raise StartError(f"openssl {arguments[0]}: exit status {done.returncode}\n{done.stdout}")
