/// Why there is no plan.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PlanError {
    /// The program cannot be planned.
    #[error("cannot plan this program: {problem}")]
    Task {
        /// What prevents it.
        problem: String,
    },
    /// The hardware lacks a link that every plan needs.
    #[error("cannot plan for hardware `{hardware}`: it has no link from {link}")]
    NoLink {
        /// The profile's name.
        hardware: String,
        /// The missing link.
        link: crate::Link,
    },
    /// Nothing fits the budget.
    #[error("no plan fits the budget: {0}")]
    TooSmall(Box<crate::TooSmall>),
    /// The checker rejects the plan: a bug, reported instead of run.
    #[error("the plan is not safe to run, which is a bug in STORM: {problem}")]
    Unsafe {
        /// What the checker found.
        problem: String,
    },
    /// The decisions contradict each other or the program.
    #[error("these decisions cannot work together: {problem}")]
    Decisions {
        /// Why.
        problem: String,
    },
}
