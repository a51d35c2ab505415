use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::os::unix::net::UnixListener;
use std::thread;

use tempfile::TempDir;

use super::*;
use crate::document::{Answer, FailureKind, Pod, PodUnits, Question, encode_answer};

const CALL_TIMEOUT: Duration = Duration::from_secs(5);
/// For what is expected to use all of it.
const SHORT_TIMEOUT: Duration = Duration::from_millis(200);

fn pod() -> Pod {
    Pod {
        namespace: "ml".into(),
        name: "train-0".into(),
        uid: None,
    }
}

/// A directory and a socket as the daemon makes them.
struct Place {
    directory: TempDir,
}

impl Place {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        chmod(directory.path(), 0o700);
        Self { directory }
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("node.sock")
    }

    fn bind(&self) -> UnixListener {
        let listener = UnixListener::bind(self.socket()).unwrap();
        chmod(&self.socket(), 0o600);
        listener
    }

    /// Serves one connection.
    fn serve(&self, serve: impl FnOnce(UnixStream) + Send + 'static) {
        let listener = self.bind();
        thread::spawn(move || serve(listener.accept().unwrap().0));
    }

    fn ask(&self, limit: Duration) -> Result<PodUnits, ClientError> {
        ask(&self.socket(), &pod(), limit)
    }

    /// Asks with a short limit, which must be kept; on a busy machine the asker itself waits.
    fn ask_in_time(&self) -> ClientError {
        let started = Instant::now();
        let error = self.ask(SHORT_TIMEOUT).unwrap_err();
        assert!(
            started.elapsed() < SHORT_TIMEOUT * 100,
            "{:?}",
            started.elapsed()
        );
        error
    }

    fn not_trusted(&self) -> String {
        match self.ask(CALL_TIMEOUT).unwrap_err().fault {
            Fault::NotTrusted(why) => why,
            error => panic!("{error}"),
        }
    }
}

fn chmod(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

fn question(stream: &mut UnixStream) -> Question {
    let mut document = Vec::new();
    stream.read_to_end(&mut document).unwrap();
    Question::decode(&document).unwrap()
}

#[test]
fn failure_is_read_although_the_question_was_not() {
    for _ in 0..50 {
        let place = Place::new();
        place.serve(|mut stream| {
            let failure = Failure::new(FailureKind::NotAllowed, "uid 7");
            stream.write_all(&encode_answer(&Err(failure))).unwrap();
        });
        let error = place.ask(CALL_TIMEOUT).unwrap_err();
        assert!(error.failure().is_some(), "{error}");
    }
}

#[test]
fn server_that_answers_byte_by_byte_costs_no_more_than_the_limit() {
    let place = Place::new();
    place.serve(|mut stream| {
        while stream.write_all(b" ").is_ok() {
            thread::sleep(Duration::from_millis(5));
        }
    });
    let error = place.ask_in_time();
    assert!(
        matches!(
            error.fault,
            Fault::TimedOut {
                step: Step::Read,
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn server_that_accepts_no_connection_costs_no_more_than_the_limit() {
    let place = Place::new();
    let _listener = place.bind();
    // As long as the backlog has room, a connect succeeds without anybody accepting.
    let mut waiting = Vec::new();
    let error = loop {
        let call = place.ask_in_time();
        if !matches!(
            call.fault,
            Fault::TimedOut {
                step: Step::Read,
                ..
            }
        ) {
            break call;
        }
        // Many at once: each of them would wait out its limit.
        for _ in 0..200 {
            let address = UnixAddr::new(&place.socket()).unwrap();
            let flags = SockFlag::SOCK_NONBLOCK;
            let file = socket::socket(AddressFamily::Unix, SockType::Stream, flags, None).unwrap();
            if socket::connect(file.as_raw_fd(), &address).is_ok() {
                waiting.push(file);
            }
        }
    };
    assert!(
        matches!(
            error.fault,
            Fault::TimedOut {
                step: Step::Connect,
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn answer_without_end_is_cut_off() {
    let place = Place::new();
    place.serve(|mut stream| while stream.write_all(&[b' '; 4096]).is_ok() {});
    let error = place.ask(CALL_TIMEOUT).unwrap_err();
    assert!(matches!(error.fault, Fault::AnswerTooLarge), "{error}");
}

#[test]
fn answer_of_another_version_is_refused() {
    let place = Place::new();
    place.serve(|mut stream| {
        question(&mut stream);
        stream.write_all(br#"{"version":2,"units":7}"#).unwrap();
    });
    let error = place.ask(CALL_TIMEOUT).unwrap_err();
    assert!(matches!(error.fault, Fault::Version(2)), "{error}");
}

#[test]
fn closed_connection_and_cut_answer_are_distinguished() {
    let place = Place::new();
    place.serve(drop);
    let error = place.ask(CALL_TIMEOUT).unwrap_err();
    assert!(matches!(error.fault, Fault::Closed), "{error}");

    let place = Place::new();
    place.serve(|mut stream| {
        question(&mut stream);
        let whole = encode_answer(&Ok(Answer::PodUnits(PodUnits::default())));
        stream.write_all(&whole[..whole.len() - 1]).unwrap();
    });
    let error = place.ask(CALL_TIMEOUT).unwrap_err();
    assert!(matches!(error.fault, Fault::Malformed(_)), "{error}");
}

#[test]
fn missing_daemon_is_reported_with_what_to_do() {
    let place = Place::new();
    let error = place.ask(CALL_TIMEOUT).unwrap_err();
    assert!(matches!(error.fault, Fault::NoSocket), "{error}");
    let text = error.to_string();
    assert!(
        text.contains("DaemonSet rdma-netdev running on this node?"),
        "{text}"
    );
    assert!(text.contains(place.socket().to_str().unwrap()), "{text}");
    let nowhere = place.directory.path().join("none/node.sock");
    let error = ask(&nowhere, &pod(), CALL_TIMEOUT).unwrap_err();
    assert!(matches!(error.fault, Fault::NoSocket), "{error}");

    drop(place.bind());
    let error = place.ask(CALL_TIMEOUT).unwrap_err();
    assert!(matches!(error.fault, Fault::Refused), "{error}");
    assert!(
        error.to_string().contains("DaemonSet rdma-netdev"),
        "{error}"
    );
}

#[test]
fn socket_that_others_can_replace_is_not_asked() {
    let place = Place::new();
    let _listener = place.bind();
    for mode in [0o720, 0o702, 0o1777] {
        chmod(place.directory.path(), mode);
        let why = place.not_trusted();
        assert!(why.contains(&format!("mode {mode:04o}")), "{why}");
    }
    chmod(place.directory.path(), 0o755);
    for mode in [0o620, 0o602, 0o666] {
        chmod(&place.socket(), mode);
        let why = place.not_trusted();
        assert!(why.contains("node.sock is writable by others"), "{why}");
    }
}

#[test]
fn link_in_place_of_the_directory_or_the_socket_is_not_followed() {
    let place = Place::new();
    let _listener = place.bind();
    let beside = tempfile::tempdir().unwrap();
    let link = beside.path().join("link");
    symlink(place.directory.path(), &link).unwrap();
    let error = ask(&link.join("node.sock"), &pod(), CALL_TIMEOUT).unwrap_err();
    assert!(
        error.to_string().contains("link is not a directory"),
        "{error}"
    );
    let link = place.directory.path().join("other.sock");
    symlink(place.socket(), &link).unwrap();
    let error = ask(&link, &pod(), CALL_TIMEOUT).unwrap_err();
    assert!(
        error.to_string().contains("other.sock is not a socket"),
        "{error}"
    );
}

/// Only root can give files away; for others there is nothing to prove here.
#[test]
fn socket_of_another_user_is_not_asked() {
    if !geteuid().is_root() {
        return;
    }
    let place = Place::new();
    let _listener = place.bind();
    chown(place.socket(), Some(65534), None).unwrap();
    assert!(
        place
            .not_trusted()
            .contains("node.sock belongs to uid 65534")
    );
    chown(place.socket(), Some(0), None).unwrap();
    chown(place.directory.path(), Some(65534), None).unwrap();
    assert!(place.not_trusted().ends_with("belongs to uid 65534"));
}

#[test]
fn question_that_is_too_long_is_not_sent() {
    let long = Pod {
        name: "n".repeat(QUESTION_MAX_BYTES),
        ..pod()
    };
    let error = ask(Path::new("nowhere"), &long, CALL_TIMEOUT).unwrap_err();
    assert!(matches!(error.fault, Fault::QuestionTooLarge(_)), "{error}");
}
