//! An HTTP/1.1 server on the loopback address that answers as a test tells it to, faults included.
//!
//! A closure maps each [`Request`] to a [`Response`]: a status, headers, a body, and what goes wrong on the way (a delay,
//! a stall in mid-body, a cut connection, a false length). What was asked and how much was sent is recorded.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// What a client asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// `GET`, `POST`, ...
    pub method: String,
    /// Path with query, as sent.
    pub path: String,
    /// Names in lower case, in order.
    pub headers: Vec<(String, String)>,
    /// As many bytes as `content-length` said.
    pub body: Vec<u8>,
}

impl Request {
    /// The first header of this name (lower case).
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(found, _)| found == name).map(|(_, value)| value.as_str())
    }
}

/// Which length a response claims for its body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Length {
    /// The true one.
    True,
    /// This one, true or not.
    Claimed(u64),
    /// None: the body ends with the connection.
    Unsaid,
}

/// Bytes of a response: `n_bytes` of an endless repetition of `block`, from `start` on. So a body of gigabytes takes no
/// memory, and a range of one costs nothing to make.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Body {
    /// What is repeated. Empty only if there are no bytes.
    pub block: Arc<[u8]>,
    /// First byte, counted in the repetition.
    pub start: u64,
    /// Number of bytes.
    pub n_bytes: u64,
}

impl Body {
    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.n_bytes == 0
    }

    /// Part of it.
    ///
    /// # Panics
    /// If the range is not within the body.
    pub fn slice(&self, range: std::ops::Range<u64>) -> Self {
        assert!(range.start <= range.end && range.end <= self.n_bytes, "{range:?} of {}", self.n_bytes);
        Self { block: self.block.clone(), start: self.start + range.start, n_bytes: range.end - range.start }
    }

    /// All of it, in memory.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.parts(0..self.n_bytes, &mut |part| {
            bytes.extend_from_slice(part);
            Ok(())
        })
        .expect("memory takes everything");
        bytes
    }

    /// Calls `take` with one piece after another.
    fn parts(
        &self,
        range: std::ops::Range<u64>,
        take: &mut dyn FnMut(&[u8]) -> std::io::Result<()>,
    ) -> std::io::Result<()> {
        let mut at = range.start;
        while at < range.end {
            let place = ((self.start + at) % self.block.len() as u64) as usize;
            let n = (self.block.len() - place).min((range.end - at) as usize);
            take(&self.block[place..place + n])?;
            at += n as u64;
        }
        Ok(())
    }
}

impl From<Vec<u8>> for Body {
    fn from(bytes: Vec<u8>) -> Self {
        Self { n_bytes: bytes.len() as u64, start: 0, block: bytes.into() }
    }
}

impl From<&[u8]> for Body {
    fn from(bytes: &[u8]) -> Self {
        bytes.to_vec().into()
    }
}

impl From<&str> for Body {
    fn from(text: &str) -> Self {
        text.as_bytes().into()
    }
}

impl From<String> for Body {
    fn from(text: String) -> Self {
        text.into_bytes().into()
    }
}

/// What a client is answered, and what goes wrong meanwhile.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Response {
    /// Status code.
    pub status: u16,
    /// Sent as they are, besides the length.
    pub headers: Vec<(String, String)>,
    /// The whole body.
    pub body: Body,
    /// Which length is claimed.
    pub length: Length,
    /// Waits so long before anything is sent.
    pub delay: Duration,
    /// Sends so many bytes of the body, waits so long, goes on.
    pub stall: Option<(usize, Duration)>,
    /// Sends so many bytes of the body at a time, and waits so long after each.
    pub pace: Option<(usize, Duration)>,
    /// Sends so many bytes of the body, then closes the connection.
    pub cut_after: Option<usize>,
    /// Closes the connection instead of answering.
    pub drop_connection: bool,
}

impl Response {
    /// A response with an empty body.
    pub fn status(status: u16) -> Self {
        Self {
            status,
            headers: Vec::new(),
            body: Vec::new().into(),
            length: Length::True,
            delay: Duration::ZERO,
            stall: None,
            pace: None,
            cut_after: None,
            drop_connection: false,
        }
    }

    /// Status 200 with a body.
    pub fn ok(body: impl Into<Body>) -> Self {
        Self::status(200).body(body)
    }

    /// No response at all: the connection is closed.
    pub fn dropped() -> Self {
        Self { drop_connection: true, ..Self::status(200) }
    }

    /// Sets the body.
    pub fn body(mut self, body: impl Into<Body>) -> Self {
        self.body = body.into();
        self
    }

    /// Adds a header.
    pub fn header(mut self, name: &str, value: impl Into<String>) -> Self {
        self.headers.push((name.to_owned(), value.into()));
        self
    }

    /// Closes the connection after so many bytes of the body.
    pub fn cut_after(mut self, n_bytes: usize) -> Self {
        self.cut_after = Some(n_bytes);
        self
    }

    /// Claims a length.
    pub fn length(mut self, length: Length) -> Self {
        self.length = length;
        self
    }

    /// Waits before answering.
    pub fn delay(mut self, delay: Duration) -> Self {
        self.delay = delay;
        self
    }

    /// Sends so many bytes at a time, and waits after each.
    pub fn pace(mut self, n_bytes: usize, pause: Duration) -> Self {
        self.pace = Some((n_bytes, pause));
        self
    }

    /// Waits after so many bytes of the body.
    pub fn stall(mut self, after_bytes: usize, pause: Duration) -> Self {
        self.stall = Some((after_bytes, pause));
        self
    }
}

type Handler = dyn Fn(&Request) -> Response + Send + Sync;

struct State {
    handler: Box<Handler>,
    requests: Mutex<Vec<Request>>,
    body_bytes_sent: AtomicU64,
    stop: AtomicBool,
}

/// A running server. Stops when dropped.
pub struct Server {
    scheme: &'static str,
    address: SocketAddr,
    state: Arc<State>,
    listener: Option<JoinHandle<()>>,
}

impl Server {
    /// Starts on a free port of the loopback address. Connections are served side by side, each kept alive.
    ///
    /// # Panics
    /// If no port can be had: nothing can be tested then.
    pub fn start(handler: impl Fn(&Request) -> Response + Send + Sync + 'static) -> Self {
        Self::start_with(None, handler)
    }

    /// Like [`Server::start`], over TLS with the certificate of [`crate::tls`].
    ///
    /// # Panics
    /// If no port can be had.
    pub fn start_tls(handler: impl Fn(&Request) -> Response + Send + Sync + 'static) -> Self {
        Self::start_with(Some(crate::tls::server_config()), handler)
    }

    fn start_with(
        tls: Option<Arc<rustls::ServerConfig>>,
        handler: impl Fn(&Request) -> Response + Send + Sync + 'static,
    ) -> Self {
        let scheme = if tls.is_some() { "https" } else { "http" };
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free loopback port");
        let address = listener.local_addr().expect("a bound listener has an address");
        let state = Arc::new(State {
            handler: Box::new(handler),
            requests: Mutex::default(),
            body_bytes_sent: AtomicU64::new(0),
            stop: AtomicBool::new(false),
        });
        let shared = state.clone();
        let listener = std::thread::spawn(move || {
            for stream in listener.incoming() {
                if shared.stop.load(Ordering::Relaxed) {
                    break;
                }
                if let Ok(stream) = stream {
                    let (shared, tls) = (shared.clone(), tls.clone());
                    // A client that goes away ends its connection and nothing else.
                    std::thread::spawn(move || drop(serve_stream(&stream, tls, &shared)));
                }
            }
        });
        Self { scheme, address, state, listener: Some(listener) }
    }

    /// Gives these responses one after another; when none is left, the last again.
    ///
    /// # Panics
    /// If there are none.
    pub fn scripted(responses: Vec<Response>) -> Self {
        assert!(!responses.is_empty(), "a script needs a response");
        let next = Mutex::new(0);
        Self::start(move |_| {
            let mut next = next.lock().expect("no handler panics");
            let response = responses[(*next).min(responses.len() - 1)].clone();
            *next += 1;
            response
        })
    }

    /// `http://127.0.0.1:PORT` (`https` over TLS), without a slash at the end.
    pub fn url(&self) -> String {
        format!("{}://{}", self.scheme, self.address)
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// All requests so far, in the order in which they were read.
    ///
    /// # Panics
    /// If a handler panicked.
    pub fn requests(&self) -> Vec<Request> {
        self.state.requests.lock().expect("no handler panics").clone()
    }

    /// Bytes of bodies sent so far.
    pub fn body_bytes_sent(&self) -> u64 {
        self.state.body_bytes_sent.load(Ordering::Relaxed)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.state.stop.store(true, Ordering::Relaxed);
        // Wakes the listener, which waits for a connection.
        drop(TcpStream::connect(self.address));
        if let Some(listener) = self.listener.take() {
            drop(listener.join());
        }
    }
}

/// All requests of one connection, in the clear or not.
fn serve_stream(
    stream: &TcpStream,
    tls: Option<Arc<rustls::ServerConfig>>,
    state: &State,
) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    match tls {
        None => serve(stream, state)?,
        Some(config) => {
            let session = rustls::ServerConnection::new(config).map_err(std::io::Error::other)?;
            let mut secured = rustls::StreamOwned::new(session, stream);
            serve(&mut secured, state)?;
            secured.conn.send_close_notify();
            secured.flush()?;
        }
    }
    stream.shutdown(Shutdown::Both)
}

/// All requests of one connection.
fn serve(connection: impl Read + Write, state: &State) -> std::io::Result<()> {
    let mut reader = BufReader::new(connection);
    while let Some(request) = read_request(&mut reader)? {
        let head_only = request.method == "HEAD";
        let response = (state.handler)(&request);
        state.requests.lock().expect("no handler panics").push(request);
        if !answer(reader.get_mut(), state, &response, head_only)? {
            break;
        }
    }
    Ok(())
}

fn read_request(reader: &mut impl BufRead) -> std::io::Result<Option<Request>> {
    let mut line = String::new();
    if reader.read_line(&mut line)? == 0 {
        return Ok(None);
    }
    let mut words = line.split_whitespace().map(str::to_owned);
    let (Some(method), Some(path)) = (words.next(), words.next()) else { return Ok(None) };
    let mut headers = Vec::new();
    loop {
        line.clear();
        reader.read_line(&mut line)?;
        match line.trim_end().split_once(':') {
            Some((name, value)) => headers.push((name.to_ascii_lowercase(), value.trim().to_owned())),
            None => break,
        }
    }
    let mut request = Request { method, path, headers, body: Vec::new() };
    let length = request.header("content-length").and_then(|text| text.parse().ok()).unwrap_or(0);
    reader.take(length).read_to_end(&mut request.body)?;
    Ok(Some(request))
}

/// Whether the connection can go on.
fn answer(
    stream: &mut impl Write,
    state: &State,
    response: &Response,
    head_only: bool,
) -> std::io::Result<bool> {
    wait(response.delay, state);
    if response.drop_connection || state.stop.load(Ordering::Relaxed) {
        return Ok(false);
    }
    let mut head = format!("HTTP/1.1 {} {}\r\n", response.status, reason(response.status));
    for (name, value) in &response.headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    let n_bytes = response.body.n_bytes;
    match response.length {
        Length::True => head.push_str(&format!("content-length: {n_bytes}\r\n")),
        Length::Claimed(length) => head.push_str(&format!("content-length: {length}\r\n")),
        Length::Unsaid => head.push_str("connection: close\r\n"),
    }
    head.push_str("\r\n");
    stream.write_all(head.as_bytes())?;
    if head_only {
        stream.flush()?;
        return Ok(response.length != Length::Unsaid);
    }
    let end = response.cut_after.map_or(n_bytes, |cut| n_bytes.min(cut as u64));
    let stall = response.stall.map_or((end, Duration::ZERO), |(after, pause)| (end.min(after as u64), pause));
    send(stream, state, response, 0..stall.0)?;
    wait(stall.1, state);
    send(stream, state, response, stall.0..end)?;
    stream.flush()?;
    let complete = match response.length {
        Length::True => end == n_bytes,
        Length::Claimed(length) => end == length,
        Length::Unsaid => false,
    };
    Ok(complete && response.cut_after.is_none())
}

/// Sends a part of the body at the pace asked for, as long as the server lives.
fn send(
    stream: &mut impl Write,
    state: &State,
    response: &Response,
    range: std::ops::Range<u64>,
) -> std::io::Result<()> {
    let (step, pause) = response.pace.map_or((usize::MAX, Duration::ZERO), |(step, pause)| (step, pause));
    response.body.parts(range, &mut |part| {
        for piece in part.chunks(step) {
            if state.stop.load(Ordering::Relaxed) {
                return Err(std::io::ErrorKind::ConnectionAborted.into());
            }
            stream.write_all(piece)?;
            state.body_bytes_sent.fetch_add(piece.len() as u64, Ordering::Relaxed);
            wait(pause, state);
        }
        Ok(())
    })
}

/// Sleeps, but no longer than the server lives.
fn wait(time: Duration, state: &State) {
    const STEP: Duration = Duration::from_millis(5);
    let mut left = time;
    while !left.is_zero() && !state.stop.load(Ordering::Relaxed) {
        std::thread::sleep(left.min(STEP));
        left = left.saturating_sub(STEP);
    }
}

fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        206 => "Partial Content",
        301 | 302 | 303 | 307 | 308 => "Redirect",
        400 => "Bad Request",
        401 => "Unauthorized",
        402 => "Payment Required",
        403 => "Forbidden",
        404 => "Not Found",
        416 => "Range Not Satisfiable",
        429 => "Too Many Requests",
        500 => "Internal Server Error",
        502 => "Bad Gateway",
        503 => "Service Unavailable",
        _ => "Status",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Everything that comes back for the text sent, until the connection closes.
    fn exchange(server: &Server, text: &str) -> String {
        let mut stream = TcpStream::connect(server.address).unwrap();
        stream.write_all(text.as_bytes()).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let mut back = Vec::new();
        stream.read_to_end(&mut back).unwrap();
        String::from_utf8(back).unwrap()
    }

    #[test]
    fn requests_are_recorded_and_one_connection_serves_several() {
        let server = Server::start(|request| Response::ok(request.path.clone()).header("x-seen", "yes"));
        let back = exchange(
            &server,
            "GET /a?b=1 HTTP/1.1\r\nHost: x\r\n\r\nPOST /c HTTP/1.1\r\nContent-Length: 3\r\n\r\nxyz",
        );
        assert_eq!(back.matches("HTTP/1.1 200 OK\r\nx-seen: yes\r\n").count(), 2, "{back}");
        assert!(back.contains("\r\n\r\n/a?b=1") && back.ends_with("/c"));
        let requests = server.requests();
        assert_eq!(requests[0].header("host"), Some("x"));
        assert_eq!((requests[1].method.as_str(), requests[1].body.as_slice()), ("POST", b"xyz".as_slice()));
        assert_eq!(server.body_bytes_sent(), 8);
    }

    #[test]
    fn a_script_cuts_lies_and_drops() {
        let server = Server::scripted(vec![
            Response::ok("whole body").cut_after(5),
            Response::ok("short").length(Length::Claimed(90)).stall(2, Duration::from_millis(1)),
            Response::ok("to the end").length(Length::Unsaid),
            Response::dropped(),
        ]);
        let get = "GET / HTTP/1.1\r\n\r\n";
        assert!(exchange(&server, get).ends_with("content-length: 10\r\n\r\nwhole"));
        assert!(exchange(&server, get).ends_with("content-length: 90\r\n\r\nshort"));
        assert!(exchange(&server, get).ends_with("connection: close\r\n\r\nto the end"));
        assert_eq!(exchange(&server, get), "");
        assert_eq!(exchange(&server, get), "", "the last response repeats");
    }

    #[test]
    fn head_tells_the_length_and_sends_no_body() {
        let server = Server::scripted(vec![Response::status(206).body("four")]);
        let back = exchange(&server, "HEAD / HTTP/1.1\r\n\r\n");
        assert!(
            back.starts_with("HTTP/1.1 206 Partial Content") && back.ends_with("content-length: 4\r\n\r\n")
        );
    }

    #[test]
    fn a_server_that_stalls_still_stops() {
        let server = Server::scripted(vec![Response::ok("x").delay(Duration::from_hours(1))]);
        let mut stream = TcpStream::connect(server.address).unwrap();
        stream.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        while server.requests().is_empty() {
            std::thread::yield_now();
        }
        drop(server);
        assert_eq!(stream.read(&mut [0]).unwrap(), 0, "the connection ends with the server");
    }
}
