//! A slot's attachment with `rdma-netdev` killed at system calls all through ADD and DEL, with the
//! daemon killed at those by which it binds and commits, and with files that somebody put in its way:
//! the next DEL or ADD heals everything.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::symlink;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use e2e::case;
use e2e::cni::Call;
use e2e::daemon::Daemon;
use e2e::harness::Case;
use e2e::host_state::{State, unchanged};
use e2e::kubelet::Pod;
use e2e::scene::{DENIED, PCI, TRY_AGAIN, answer_of};
use serde_json::{Value, json};

use super::cni_faults::{at_least_ten_killed, inject, spread, trace, was_killed};
use super::cni_late::{NIC, Node, WAIT_TIMEOUT, start};

pub(crate) const CASES: &[Case] = &[
    case!(a_killed_add_of_a_slot_leaves_nothing, Root, Netns, Strace),
    case!(
        an_add_of_a_slot_after_a_killed_one_heals,
        Root,
        Netns,
        Strace
    ),
    case!(
        a_killed_del_of_a_slot_is_finished_by_the_next,
        Root,
        Netns,
        Strace
    ),
    case!(
        a_daemon_killed_while_it_binds_or_commits_leaves_nothing,
        Root,
        Netns,
        Strace
    ),
    case!(a_forged_slot_is_denied_by_name, Root, Netns),
    case!(another_pods_slot_is_denied_while_that_has_it, Root, Netns),
    case!(
        a_cdi_directory_that_became_a_link_is_not_followed_by_del,
        Root,
        Netns
    ),
];

struct Fixture {
    node: Node,
    call: Call,
    network: Value,
    slot: String,
    before: State,
}

impl Fixture {
    fn new() -> Result<Self> {
        let node = Node::new()?;
        let (slot, call) = node.admit("a")?;
        let network = node
            .scene
            .network(&json!({"attach": "move", "deviceID": slot}));
        let before = node.scene.host_state()?;
        let fixture = Self {
            node,
            call,
            network,
            slot,
            before,
        };
        // The first ADD on a node sets up directories; later ones have fewer system calls.
        fixture.add(&fixture.call)?;
        fixture.del(&fixture.call)?;
        fixture.clean("after the first round")?;
        Ok(fixture)
    }

    fn config(&self) -> String {
        self.network.to_string()
    }

    fn add(&self, call: &Call) -> Result<()> {
        let added = answer_of(call, "ADD", &self.network)?.success();
        added.map(drop).with_context(|| self.node.daemon.log())
    }

    fn del(&self, call: &Call) -> Result<()> {
        answer_of(call, "DEL", &self.network)?
            .success()
            .map(drop)
            .context("DEL")
    }

    /// A call for the pod's next sandbox.
    fn next_sandbox(&self) -> Call {
        Call {
            container_id: "c2".into(),
            ..self.call.clone()
        }
    }

    /// Attaches as a runtime and a kubelet do: each attempt that has to be made again is undone
    /// before the next.
    fn add_at_last(&self, call: &Call) -> Result<()> {
        let started = Instant::now();
        loop {
            let answer = answer_of(call, "ADD", &self.network)?;
            if answer.status.success() {
                return Ok(());
            }
            let (code, text) = answer.refusal()?;
            ensure!(code == TRY_AGAIN, "{code}: {text}");
            let log = || format!("{text}\n{}", self.node.daemon.log());
            ensure!(started.elapsed() < WAIT_TIMEOUT, "{}", log());
            self.del(call)?;
            thread::sleep(Duration::from_millis(100));
        }
    }

    fn clean(&self, when: &str) -> Result<()> {
        unchanged(&self.before, || self.node.scene.host_state(), when)?;
        // A question whose client was killed is answered all the same, and then undone.
        let started = Instant::now();
        loop {
            let left = (self.node.bound()?, self.node.cdi_files());
            if left == (Vec::new(), 0) {
                return Ok(());
            }
            let log = || format!("{when}: {left:?} is left: {}", self.node.daemon.log());
            ensure!(started.elapsed() < WAIT_TIMEOUT, "{}", log());
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// ADD and DEL of the pod's next sandbox, and nothing is left of it.
    fn works(&self, when: &str) -> Result<()> {
        let next = self.next_sandbox();
        self.add_at_last(&next).context(when.to_owned())?;
        assert_eq!(
            (self.node.bound()?, self.node.cdi_files()),
            (vec![PCI.to_owned()], 1),
            "{when}"
        );
        self.node.kubelet.run_options("default/a", "main")?;
        self.del(&next)?;
        self.clean(when)
    }

    /// Kills the daemon, if it is not dead, and starts one that the kubelet knows.
    fn restart_daemon(&mut self) -> Result<()> {
        self.node.kill_daemon()?;
        // What it sees of the next one it has not seen of this one.
        let gone = self.node.kubelet.wait_allocatable(NIC, 0, WAIT_TIMEOUT);
        gone.context("the kubelet sees that the daemon is dead")?;
        self.node.daemon = start(&self.node.scene)?;
        self.node.ready()
    }
}

fn a_killed_add_of_a_slot_leaves_nothing() -> Result<()> {
    let fixture = Fixture::new()?;
    let (call, config) = (&fixture.call, fixture.config());
    at_least_ten_killed(|| {
        let points = trace(&fixture.node.scene.host, call, "ADD", &config)?;
        fixture.del(call)?;
        let mut killed = 0;
        for point in spread(&points, 20) {
            let answer = inject(call, "ADD", &config, &point, "signal=KILL")?;
            killed += usize::from(was_killed(&answer));
            let when = format!("after a kill at {point:?} and DEL");
            fixture.del(call).context(when.clone())?;
            fixture.clean(&when)?;
        }
        Ok(killed)
    })?;
    fixture.works("at the end")
}

fn an_add_of_a_slot_after_a_killed_one_heals() -> Result<()> {
    let fixture = Fixture::new()?;
    let (call, config) = (&fixture.call, fixture.config());
    at_least_ten_killed(|| {
        let points = trace(&fixture.node.scene.host, call, "ADD", &config)?;
        fixture.del(call)?;
        let mut killed = 0;
        for point in spread(&points, 16) {
            let answer = inject(call, "ADD", &config, &point, "signal=KILL")?;
            killed += usize::from(was_killed(&answer));
            let again = answer_of(call, "ADD", &fixture.network)?;
            if !again.status.success() {
                // Refused only because the interface is there: the runtime's DEL is due first.
                let (code, message) = again.refusal()?;
                ensure!(code == 103, "after a kill at {point:?}: {code} {message}");
            }
            fixture.del(call)?;
            fixture.clean(&format!("after a kill at {point:?}, ADD and DEL"))?;
        }
        Ok(killed)
    })
}

fn a_killed_del_of_a_slot_is_finished_by_the_next() -> Result<()> {
    let fixture = Fixture::new()?;
    let (call, config) = (&fixture.call, fixture.config());
    at_least_ten_killed(|| {
        fixture.add(call)?;
        let points = trace(&fixture.node.scene.host, call, "DEL", &config)?;
        let mut killed = 0;
        for point in spread(&points, 16) {
            fixture.add(call)?;
            let answer = inject(call, "DEL", &config, &point, "signal=KILL")?;
            killed += usize::from(was_killed(&answer));
            let when = format!("after a DEL killed at {point:?} and another");
            fixture.del(call).context(when.clone())?;
            fixture.clean(&when)?;
        }
        Ok(killed)
    })?;
    fixture.works("at the end")
}

/// strace on a running daemon that it kills; it ends with the daemon, or when dropped.
pub(crate) struct Killer(Child);

impl Killer {
    /// Kills the daemon before the n-th such system call of one of its threads. On a busy machine
    /// strace has failed to attach to a daemon that lives: it is tried again.
    pub(crate) fn attach(daemon: &Daemon, syscall: &str, number: usize) -> Result<Self> {
        let mut said = String::new();
        for _ in 0..5 {
            if let Some(killer) = Self::attempt(daemon, syscall, number, &mut said)? {
                return Ok(killer);
            }
        }
        bail!("strace did not attach: {said}")
    }

    fn attempt(
        daemon: &Daemon,
        syscall: &str,
        number: usize,
        said: &mut String,
    ) -> Result<Option<Self>> {
        let mut command = Command::new("strace");
        command.args(["-f", "-o", "/dev/null"]);
        command.args(["-p", &daemon.id().to_string()]);
        command.args(["-e", &format!("trace={syscall}")]);
        command.args(["-e", &format!("inject={syscall}:signal=KILL:when={number}")]);
        let mut child = command
            .stderr(Stdio::piped())
            .spawn()
            .context("start strace")?;
        let stderr = child.stderr.take().context("its messages")?;
        let killer = Self(child);
        let mut lines = BufReader::new(stderr);
        let mut line = String::new();
        while !line.contains("attached") {
            line.clear();
            if lines.read_line(&mut line)? == 0 {
                return Ok(None);
            }
            said.push_str(&line);
        }
        // It goes on to say what it attaches to; nobody may make it wait.
        thread::spawn(move || std::io::copy(&mut lines, &mut std::io::sink()));
        Ok(Some(killer))
    }
}

impl Drop for Killer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The daemon is killed before system calls by which it writes bindings and CDI files, reads the host,
/// and answers. The plugin undoes what it did, and the pod's next sandbox gets the NIC from the next
/// daemon, whether the runtime's DEL reached it or not.
fn a_daemon_killed_while_it_binds_or_commits_leaves_nothing() -> Result<()> {
    /// Those that change something, each of them; of the others, which are many, some.
    const EACH: [&str; 5] = ["linkat", "rename", "unlink", "mkdir", "sendto"];
    const SOME: [&str; 3] = ["openat", "write", "fsync"];
    const MOST: usize = 400;
    let mut fixture = Fixture::new()?;
    let mut killed = Vec::new();
    let each = EACH.map(|syscall| (syscall, 1));
    for (syscall, factor) in each.into_iter().chain(SOME.map(|syscall| (syscall, 4))) {
        let mut number = 1;
        while number < MOST {
            let when = format!("after a kill of the daemon at {syscall} {number}");
            let killer = Killer::attach(&fixture.node.daemon, syscall, number)?;
            let added = answer_of(&fixture.call, "ADD", &fixture.network)?;
            let daemon = &mut fixture.node.daemon;
            let _ = daemon.ended(Duration::from_millis(100));
            drop(killer);
            // From here on nothing kills it, but it may be killed and not gone.
            let refused = !added.status.success();
            let within = Duration::from_millis(if refused { 10_000 } else { 100 });
            let is_over = daemon.ended(within).is_ok();
            if !refused {
                // It was not asked any more, or has no more such calls.
                fixture.del(&fixture.call).context(when.clone())?;
            } else {
                let (code, text) = added.refusal()?;
                ensure!(code == TRY_AGAIN, "{when}: {code} {text}");
                unchanged(&fixture.before, || fixture.node.scene.host_state(), &when)?;
                let started = fixture.node.kubelet.run_options("default/a", "main");
                ensure!(started.is_err(), "{when} a container starts");
                // Every other time the runtime's DEL comes before the next daemon.
                if killed.len() % 2 == 0 {
                    fixture.del(&fixture.call).context(when.clone())?;
                }
            }
            fixture.restart_daemon().context(when.clone())?;
            if !is_over {
                break;
            }
            killed.push((syscall, number));
            fixture.works(&when)?;
            number = (number * factor).max(number + 1);
        }
    }
    ensure!(
        killed.len() >= 8,
        "only these kills took effect: {killed:?}"
    );
    Ok(())
}

fn a_forged_slot_is_denied_by_name() -> Result<()> {
    let fixture = Fixture::new()?;
    let long = format!("{}{}", fixture.slot, "0".repeat(40));
    let forged = [
        "slot_00000000_0",
        "slot_00000000_4294967295",
        // One more than there are.
        &fixture.slot.replace("_0", "_1"),
        &long,
        "slot_../../etc_0",
        "slot_\n_0",
        "slot__0",
    ];
    for unit in forged {
        let network = fixture
            .node
            .scene
            .network(&json!({"attach": "move", "deviceID": unit}));
        let answer = answer_of(&fixture.call, "ADD", &network)?;
        let (code, text) = answer.refusal().with_context(|| format!("{unit:?}"))?;
        // What is not a unit at all is an error of the configuration.
        ensure!([DENIED, 7].contains(&code), "{unit:?}: {code} {text}");
        let del = answer_of(&fixture.call, "DEL", &network)?;
        del.success().with_context(|| format!("DEL of {unit:?}"))?;
        fixture.clean(&format!("after {unit:?}"))?;
    }
    fixture.works("at the end")
}

/// A pod with a slot of its own names that of another pod, which has its NIC, and undoes what it does
/// not have.
fn another_pods_slot_is_denied_while_that_has_it() -> Result<()> {
    let fixture = Fixture::new()?;
    let node = &fixture.node;
    fixture.add(&fixture.call)?;
    let thief = Pod::with_limits("thief", &[])?;
    let uid = thief.metadata.uid.clone();
    node.kubelet.admit(thief)?;
    let mut call = node.call("thief", &uid);
    call.container_id = "thief".into();
    call.ifname = "net7".into();
    for victim in ["a", "thief"] {
        // Under its own name, and with the name that its victim has.
        call.args = call
            .args
            .replace("K8S_POD_NAME=thief", &format!("K8S_POD_NAME={victim}"));
        let answer = answer_of(&call, "ADD", &fixture.network)?;
        let (code, text) = answer.refusal()?;
        ensure!(
            [DENIED, TRY_AGAIN].contains(&code),
            "as {victim}: {code} {text}"
        );
        answer_of(&call, "DEL", &fixture.network)?.success()?;
        assert_eq!(
            (node.bound()?, node.cdi_files()),
            (vec![PCI.to_owned()], 1),
            "the victim has lost its NIC"
        );
        node.kubelet.run_options("default/a", "main")?;
    }
    fixture.del(&fixture.call)?;
    fixture.clean("at the end")
}

fn a_cdi_directory_that_became_a_link_is_not_followed_by_del() -> Result<()> {
    let fixture = Fixture::new()?;
    let node = &fixture.node;
    fixture.add(&fixture.call)?;
    let own = fs::read_dir(node.cdi())?.next().context("a file")??;
    let directory = node.scene.host.directory();
    let (victim, moved) = (directory.join("victim"), directory.join("moved"));
    fs::create_dir(&victim)?;
    fs::write(victim.join(own.file_name()), "the victim's")?;
    fs::rename(node.cdi(), &moved)?;
    symlink(&victim, node.cdi())?;
    // No container starts by files that somebody else has put there.
    ensure!(
        node.kubelet.run_options("default/a", "main").is_err(),
        "a container starts"
    );
    fixture.del(&fixture.call)?;
    unchanged(&fixture.before, || node.scene.host_state(), "after DEL")?;
    assert_eq!(
        fs::read_to_string(victim.join(own.file_name()))?,
        "the victim's"
    );
    let added = answer_of(&fixture.call, "ADD", &fixture.network)?;
    let (code, text) = added.refusal()?;
    ensure!(code == TRY_AGAIN && text.contains("link"), "{code} {text}");
    unchanged(&fixture.before, || node.scene.host_state(), "after ADD")?;
    fs::remove_file(node.cdi())?;
    fs::rename(&moved, node.cdi())?;
    // What DEL could not remove is gone before a container can have it.
    fixture.works("with the directory in its place")
}
