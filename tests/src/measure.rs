//! What a call of a program costs, and tables of two contestants' costs.
//!
//! Wall time is from the start of the process, without a shell between, to its end; CPU time is
//! that of the process and all that it ran.

use std::io::Write;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;

/// What one call cost.
#[derive(Debug, Clone, Copy, Default)]
pub struct Cost {
    /// From its start to its end.
    pub wall: Duration,
    /// Of the process and all that it ran.
    pub cpu: Duration,
}

/// A contestant's calls of one kind.
#[derive(Debug, Default)]
pub struct Costs(pub Vec<Cost>);

impl Costs {
    /// The median.
    pub fn wall(&self) -> Duration {
        median(self.0.iter().map(|cost| cost.wall).collect())
    }

    /// The mean: the kernel counts CPU time in steps too coarse for a median.
    pub fn cpu(&self) -> Duration {
        let total: Duration = self.0.iter().map(|cost| cost.cpu).sum();
        total / u32::try_from(self.0.len()).unwrap_or(1).max(1)
    }
}

fn median(mut list: Vec<Duration>) -> Duration {
    list.sort_unstable();
    list.get(list.len() / 2).copied().unwrap_or_default()
}

/// Runs a program to its end with this input.
///
/// # Errors
/// It cannot be started. That it failed is not an error here.
pub fn cost_of(process: &mut Command, stdin: &[u8]) -> Result<(Cost, Output)> {
    let cpu = || -> Result<Duration> {
        let usage = getrusage(UsageWho::RUSAGE_CHILDREN)?;
        let time = usage.user_time() + usage.system_time();
        Ok(Duration::from_micros(u64::try_from(
            time.num_microseconds(),
        )?))
    };
    let before = cpu()?;
    let started = Instant::now();
    let mut child = process
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("start {}", process.get_program().display()))?;
    if let Some(mut pipe) = child.stdin.take() {
        // VERSION and a program that does nothing do not read it.
        let _ = pipe.write_all(stdin);
    }
    let output = child.wait_with_output()?;
    let wall = started.elapsed();
    let cpu = cpu()?.saturating_sub(before);
    Ok((Cost { wall, cpu }, output))
}

/// A row of the table: ours, the peer's, and the budgets of the ratios.
#[derive(Debug)]
pub struct Row {
    /// What was done, and beside what.
    pub what: String,
    /// Our cost.
    pub ours: Cost,
    /// The peer's.
    pub peer: Cost,
    /// Largest ratio of wall times.
    pub wall_budget: Option<f64>,
    /// Largest ratio of CPU times.
    pub cpu_budget: Option<f64>,
}

impl Row {
    fn ratio(ours: Duration, peer: Duration) -> f64 {
        ours.as_secs_f64() / peer.as_secs_f64().max(1e-9)
    }

    /// Whether both ratios are within their budgets.
    pub fn within(&self) -> bool {
        let fits = |budget: Option<f64>, ratio: f64| budget.is_none_or(|budget| ratio <= budget);
        fits(
            self.wall_budget,
            Self::ratio(self.ours.wall, self.peer.wall),
        ) && fits(self.cpu_budget, Self::ratio(self.ours.cpu, self.peer.cpu))
    }

    fn line(&self) -> String {
        let column = |ours: Duration, peer: Duration, budget: Option<f64>| {
            let budget = budget.map_or_else(String::new, |budget| format!(" (≤ {budget})"));
            format!(
                "{} | {} | {:.3}{budget}",
                ms(ours),
                ms(peer),
                Self::ratio(ours, peer)
            )
        };
        format!(
            "| {} | {} | {} |",
            self.what,
            column(self.ours.wall, self.peer.wall, self.wall_budget),
            column(self.ours.cpu, self.peer.cpu, self.cpu_budget)
        )
    }
}

fn ms(time: Duration) -> String {
    format!("{:.2}", time.as_secs_f64() * 1e3)
}

/// A row from two contestants' costs; the budgets are of wall and CPU time.
pub fn row(what: &str, ours: &Costs, peer: &Costs, budgets: [Option<f64>; 2]) -> Row {
    let cost = |costs: &Costs| Cost {
        wall: costs.wall(),
        cpu: costs.cpu(),
    };
    let [wall_budget, cpu_budget] = budgets;
    Row {
        what: what.to_owned(),
        ours: cost(ours),
        peer: cost(peer),
        wall_budget,
        cpu_budget,
    }
}

/// The rows as a table in Markdown.
pub fn table(rows: &[Row]) -> String {
    let mut lines = vec![
        "| what | ours ms | peer ms | wall ratio (budget) | ours CPU ms | peer CPU ms | CPU ratio (budget) |".to_owned(),
        "|---|---|---|---|---|---|---|".to_owned(),
    ];
    lines.extend(rows.iter().map(Row::line));
    lines.push(String::new());
    lines.join("\n")
}
