//! Cases and how they are run.
//!
//! libtest cannot say at run time that a test does not apply to this machine.
//! Here a case names what it [needs](crate::need); if a need is not met, the
//! case is reported as ignored with the reason, and listed and counted at the
//! end. With `RDMA_E2E_REQUIRE=all` a need that every CI machine must meet
//! makes the case fail instead.
//!
//! Every case runs on a thread of its own, so that one which enters a
//! namespace affects no other, and one which hangs fails by name.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;
use std::{env, thread};

use anyhow::{Result, anyhow};
use libtest_mimic::{Arguments, Completion, Failed, Trial};

use crate::need::Need;

/// Set to `all`, it turns skips for needs that CI must meet into failures.
pub const REQUIRE: &str = "RDMA_E2E_REQUIRE";

/// The longest a case may take before it counts as hanging.
const CASE_TIMEOUT: Duration = Duration::from_secs(600);

/// One promise and the test that keeps it.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// Module path and function; [`case!`](crate::case) fills it in.
    pub name: &'static str,
    /// What the machine must offer.
    pub needs: &'static [Need],
    /// The test: an error or a panic is a failure.
    pub run: fn() -> Result<()>,
}

/// `case!(function)` or `case!(function, Root, Netns)`: a [`Case`] named after
/// its module and function, with the [`Need`]s it has.
#[macro_export]
macro_rules! case {
    ($run:ident $(, $need:ident $(($argument:expr))?)* $(,)?) => {
        $crate::harness::Case {
            name: concat!(module_path!(), "::", stringify!($run)),
            needs: &[$($crate::need::Need::$need $(($argument))?),*],
            run: $run,
        }
    };
}

/// Runs the cases as the command line asks, lists what was skipped, and says whether all is well.
#[must_use]
pub fn run(cases: impl IntoIterator<Item = Case>) -> ExitCode {
    let arguments = Arguments::from_args();
    let strict = env::var(REQUIRE).is_ok_and(|value| value == "all");
    let mut skipped: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut trials = Vec::new();
    for case in cases {
        let name = short_name(case.name);
        let trial = Trial::test(name, || Ok(()));
        if arguments.list || arguments.is_filtered_out(&trial) {
            trials.push(trial);
            continue;
        }
        let unmet = case
            .needs
            .iter()
            .find_map(|need| Some((*need, need.unmet()?)));
        trials.push(match unmet {
            None => Trial::test(name, move || on_own_thread(case.run)),
            Some((need, reason)) if strict && need.is_due_in_ci() => Trial::test(name, move || {
                Err(Failed::from(format!(
                    "{REQUIRE}=all, but this machine lacks a need: {reason}"
                )))
            }),
            Some((_, reason)) => {
                skipped
                    .entry(reason.clone())
                    .or_default()
                    .push(name.to_owned());
                Trial::ignorable_test(name, move || Ok(Completion::ignored_with(reason)))
            }
        });
    }
    let conclusion = libtest_mimic::run(&arguments, trials);
    report_skipped(&skipped);
    conclusion.exit_code()
}

/// `e2e::cases::dp_register::again` is known as `dp_register::again`.
fn short_name(path: &'static str) -> &'static str {
    path.split_once("cases::").map_or(path, |(_, name)| name)
}

#[expect(
    clippy::print_stdout,
    reason = "the report of a test run belongs on stdout"
)]
fn report_skipped(skipped: &BTreeMap<String, Vec<String>>) {
    if skipped.is_empty() {
        return;
    }
    println!(
        "skipped on this machine: {}",
        skipped.values().map(Vec::len).sum::<usize>()
    );
    for (reason, names) in skipped {
        println!("  {} for want of: {reason}", names.len());
        for name in names {
            println!("    {name}");
        }
    }
    println!();
}

fn on_own_thread(run: fn() -> Result<()>) -> std::result::Result<(), Failed> {
    let (done, result) = channel();
    thread::spawn(move || {
        let outcome = catch_unwind(AssertUnwindSafe(run))
            .unwrap_or_else(|panic| Err(anyhow!("panicked: {}", panic_text(panic.as_ref()))));
        // The receiver is gone only if the case was given up.
        let _ = done.send(outcome);
    });
    match result.recv_timeout(CASE_TIMEOUT) {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) => Err(Failed::from(format!("{error:#}"))),
        Err(RecvTimeoutError::Timeout) => {
            Err(Failed::from(format!("hangs: no end in {CASE_TIMEOUT:?}")))
        }
        Err(RecvTimeoutError::Disconnected) => Err(Failed::from("the case ended its thread")),
    }
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    if let Some(text) = panic.downcast_ref::<&str>() {
        text
    } else if let Some(text) = panic.downcast_ref::<String>() {
        text
    } else {
        "no message"
    }
}
