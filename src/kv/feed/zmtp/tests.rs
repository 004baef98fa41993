//! Against peers that send exactly these bytes.

use super::*;
use tokio::net::TcpListener;

/// A peer that shakes hands as `socket_type`, sends `bytes`, and reads until the other end
/// hangs up.
async fn peer(socket_type: &'static str, bytes: Vec<u8>) -> String {
    let (listener, address) = listen().await;
    tokio::spawn(async move {
        let mut stream = accept(&listener, socket_type, 0).await;
        // The other end may hang up before it has read everything.
        let _ = stream.write_all(&bytes).await;
        let _ = stream.read_to_end(&mut Vec::new()).await;
    });
    address
}

/// A place to be dialled.
pub(in super::super) async fn listen() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("binds");
    let address = listener.local_addr().expect("bound");
    (listener, format!("tcp://{address}"))
}

/// Shakes hands with the next caller, as version 3.`minor`.
pub(in super::super) async fn accept(
    listener: &TcpListener,
    socket_type: &'static str,
    minor: u8,
) -> TcpStream {
    let (mut stream, _) = listener.accept().await.expect("accepts");
    let mut greeting = [0u8; 64];
    greeting[..1].copy_from_slice(b"\xff");
    greeting[9..12].copy_from_slice(&[0x7f, 3, minor]);
    greeting[12..16].copy_from_slice(b"NULL");
    stream.write_all(&greeting).await.expect("writes");
    let mut ready = b"\x05READY\x08Identity\0\0\0\0\x0bSocket-Type\0\0\0".to_vec();
    ready.push(u8::try_from(socket_type.len()).expect("short"));
    ready.extend_from_slice(socket_type.as_bytes());
    let len = u8::try_from(ready.len()).expect("short");
    stream.write_all(&[4, len]).await.expect("writes");
    stream.write_all(&ready).await.expect("writes");
    let mut theirs = [0u8; 66];
    stream
        .read_exact(&mut theirs)
        .await
        .expect("greeting, frame head");
    let mut ready = vec![0; usize::from(theirs[65])];
    stream.read_exact(&mut ready).await.expect("READY");
    stream
}

#[tokio::test]
async fn frames_of_every_form_arrive() {
    let mut bytes = b"\x01\x01a\x03\0\0\0\0\0\0\0\x01b\x00\x02cd".to_vec();
    bytes.extend_from_slice(b"\x04\x09\x04PING\0\0ok\x00\x00");
    let address = peer("XPUB", bytes).await;
    let mut connection = Connection::open(&address, Kind::Sub).await.expect("opens");
    connection.readable().await.expect("bytes");
    let message = connection.receive().await.expect("a message");
    let message = message.expect("a message");
    assert_eq!(message.frames, [&b"a"[..], b"b", b"cd"]);
    assert_eq!(connection.receive().await.expect("the ping"), None);
    let message = connection.receive().await.expect("a message");
    assert_eq!(message.expect("a message").frames, [b""]);
}

#[tokio::test]
async fn a_frame_that_is_too_long_is_read_past() {
    let mut bytes = b"\x01\x01t\x02".to_vec();
    let len = MAX_PAYLOAD + 8192;
    bytes.extend_from_slice(&(len as u64).to_be_bytes());
    bytes.resize(bytes.len() + len, 7);
    bytes.extend_from_slice(b"\x00\x01x");
    let address = peer("PUB", bytes).await;
    let mut connection = Connection::open(&address, Kind::Sub).await.expect("opens");
    let message = connection.receive().await.expect("a message");
    let message = message.expect("a message");
    assert_eq!((message.too_long, message.frames.len()), (true, 2));
    let message = connection.receive().await.expect("the next");
    assert_eq!(message.expect("a message").frames, [b"x"]);
}

#[tokio::test]
async fn announced_lengths_are_not_believed() {
    for announced in [1u64 << 23, u64::MAX] {
        let mut bytes = vec![2];
        bytes.extend_from_slice(&announced.to_be_bytes());
        let address = peer("PUB", bytes).await;
        let mut connection = Connection::open(&address, Kind::Sub).await.expect("opens");
        connection.writer.shutdown().await.expect("hangs up");
        assert!(connection.receive().await.is_err());
    }
}

#[tokio::test]
async fn only_matching_sockets_are_spoken_to() {
    let address = peer("ROUTER", Vec::new()).await;
    assert!(Connection::open(&address, Kind::Sub).await.is_err());
    let address = peer("ROUTER", Vec::new()).await;
    assert!(Connection::open(&address, Kind::Dealer).await.is_ok());
    assert!(Connection::open("ipc:///tmp/x", Kind::Sub).await.is_err());
}
