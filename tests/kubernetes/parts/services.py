"""Services and names: a connection-forwarding service proxy, load-balancer addresses and a DNS server.

Lives here: TCP forwarding from Service addresses to ready endpoints, A records. Never here: pods.
Invariant: a connection goes to an endpoint that was ready when it came, or is closed at once.

Not like a real cluster: the endpoint sees the node's address as its peer, UDP Services are not served, and names
outside `cluster.local` do not exist.
"""

import asyncio
import ipaddress
import struct
import threading

import isolated
from api import ApiError, follow

DOMAIN = "cluster.local"
TTL = 1


class Table:
    """What the API says of Services and their ready endpoints. All methods run on the event loop."""

    def __init__(self, api, loop):
        self.api, self.loop = api, loop
        self.services, self.slices, self.listeners, self.turn = {}, {}, {}, 0
        self.balancers = iter(ipaddress.ip_network(isolated.LOAD_BALANCER_RANGE).hosts())

    def service_changed(self, found):
        meta, spec = found["metadata"], found["spec"]
        self.services[meta["uid"]] = found
        addresses = [spec["clusterIP"]] if spec.get("clusterIP") not in (None, "", "None") else []
        addresses += [one["ip"] for one in found.get("status", {}).get("loadBalancer", {}).get("ingress", [])
                      if "ip" in one]
        for address in addresses:
            for port in spec.get("ports", []):
                if port.get("protocol", "TCP") == "TCP":
                    self._listen(meta["uid"], address, port)
        if spec.get("type") == "LoadBalancer" and len(addresses) == 1:
            self.loop.run_in_executor(None, self._balance, meta, str(next(self.balancers)))

    def service_deleted(self, uid):
        self.services.pop(uid, None)
        for key in [key for key in self.listeners if key[0] == uid]:
            server = self.listeners.pop(key)
            if server is not None:
                server.close()

    def _balance(self, meta, address):
        try:
            self.api.patch(f"/api/v1/namespaces/{meta['namespace']}/services/{meta['name']}/status",
                           {"status": {"loadBalancer": {"ingress": [{"ip": address}]}}})
        except ApiError as error:
            print(error, flush=True)

    def _listen(self, uid, address, port):
        key = (uid, address, port["port"])
        if key in self.listeners:
            return
        self.listeners[key] = None
        self.loop.create_task(self._serve(key, port.get("name", "")))

    async def _serve(self, key, port_name):
        uid, address, number = key

        async def forward(reader, writer):
            await self._forward(uid, port_name, reader, writer)
        try:
            self.listeners[key] = await asyncio.start_server(forward, address, number)
        except OSError as error:
            print(f"{address}:{number}: {error}", flush=True)

    def endpoints(self, uid, port_name):
        found = self.services.get(uid)
        if not found:
            return []
        meta = found["metadata"]
        ready = []
        for one in self.slices.values():
            if (one["metadata"]["namespace"] != meta["namespace"] or
                    one["metadata"].get("labels", {}).get("kubernetes.io/service-name") != meta["name"]):
                continue
            for port in one.get("ports") or []:
                if (port.get("name") or "") == port_name:
                    for endpoint in one.get("endpoints") or []:
                        if endpoint.get("conditions", {}).get("ready") is not False:
                            ready.append((endpoint["addresses"][0], port["port"]))
        return sorted(ready)

    async def _forward(self, uid, port_name, reader, writer):
        targets = self.endpoints(uid, port_name)
        self.turn += 1
        if targets:
            try:
                from_pod, to_pod = await asyncio.open_connection(*targets[self.turn % len(targets)])
                await asyncio.gather(_pipe(reader, to_pod), _pipe(from_pod, writer))
                to_pod.close()
            except OSError:
                pass
        writer.close()

    def lookup(self, name):
        """IPv4 addresses of a name under `cluster.local`, None when it does not exist."""
        labels = name.lower().rstrip(".").split(".")
        if labels[-3:] != ["svc", *DOMAIN.split(".")] or len(labels) < 5:
            return None
        service, namespace = labels[-5], labels[-4]
        for uid, found in self.services.items():
            if found["metadata"]["name"] == service and found["metadata"]["namespace"] == namespace:
                address = found["spec"].get("clusterIP")
                if address not in (None, "", "None"):
                    return [address]
                ports = [port.get("name", "") for port in found["spec"].get("ports", [])] or [""]
                return sorted({target[0] for port in ports for target in self.endpoints(uid, port)})
        return None


class Dns(asyncio.DatagramProtocol):
    """Answers A (and empty AAAA) queries; everything else does not exist."""

    def __init__(self, table):
        self.table = table

    def connection_made(self, transport):
        self.transport = transport

    def datagram_received(self, data, peer):
        try:
            self.transport.sendto(self.answer(data), peer)
        except (IndexError, struct.error, UnicodeDecodeError):
            pass

    def answer(self, data):
        number, flags = struct.unpack(">HH", data[:4])
        labels, at = [], 12
        while data[at]:
            labels.append(data[at + 1:at + 1 + data[at]].decode())
            at += 1 + data[at]
        question = data[12:at + 5]
        kind, = struct.unpack(">H", data[at + 1:at + 3])
        found = self.table.lookup(".".join(labels))
        addresses = found if found and kind == 1 else []
        code = 0 if found is not None else 3
        head = struct.pack(">HHHHHH", number, 0x8400 | (flags & 0x0100) | 0x0080 | code, 1, len(addresses), 0, 0)
        records = b"".join(struct.pack(">HHHIH", 0xC00C, 1, 1, TTL, 4) + ipaddress.ip_address(one).packed
                           for one in addresses)
        return head + question + records


async def _pipe(reader, writer):
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
    except OSError:
        writer.close()


def start(api, stopped):
    """Starts the proxy and the DNS server on threads of this process; returns when names are answered."""
    loop = asyncio.new_event_loop()
    table = Table(api, loop)
    up = threading.Event()

    async def serve():
        await loop.create_datagram_endpoint(lambda: Dns(table), local_addr=(isolated.NODE_ADDRESS, 53))
        up.set()

    def run():
        asyncio.set_event_loop(loop)
        loop.create_task(serve())
        loop.run_forever()

    threading.Thread(target=run, daemon=True).start()
    if not up.wait(10):
        raise RuntimeError("dns: expected to listen within 10 s")

    def on_loop(function):
        return lambda argument: loop.call_soon_threadsafe(function, argument)

    def services_seen(uids):
        for uid in [uid for uid in table.services if uid not in uids]:
            table.service_deleted(uid)

    def slice_changed(found):
        table.slices[found["metadata"]["uid"]] = found

    def slices_seen(uids):
        for uid in [uid for uid in table.slices if uid not in uids]:
            del table.slices[uid]

    kinds = (("/api/v1/services", table.service_changed,
              lambda found: table.service_deleted(found["metadata"]["uid"]), services_seen),
             ("/apis/discovery.k8s.io/v1/endpointslices", slice_changed,
              lambda found: table.slices.pop(found["metadata"]["uid"], None), slices_seen))
    for path, changed, deleted, seen in kinds:
        threading.Thread(target=follow, daemon=True,
                         args=(api, path, stopped, on_loop(changed), on_loop(deleted), on_loop(seen))).start()
