//! Learning beside the steps: a lesson runs on its own thread until its result is needed. When that
//! is depends on steps and decisions, never on a clock, so the thread changes no bit.

use super::adam::Adam;
use super::network::{Network, Tick};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{Builder, JoinHandle};

/// What a lesson learns from.
pub(super) struct Lesson {
    pub(super) ticks: Vec<Tick>,
    /// Seed of the run, and the step.
    pub(super) bits: (u64, u32),
}

impl Lesson {
    fn learn(&self, network: &Network, adam: &mut Adam) {
        let (_, gradients) = network.learn(adam.parameters(), &self.ticks, self.bits);
        adam.step(&gradients);
    }
}

/// The parameters of the controller, which lessons change.
pub(super) struct Learner {
    /// `None` while a lesson runs.
    adam: Option<Adam>,
    /// `None` before the first lesson.
    worker: Option<Worker>,
}

impl Learner {
    pub(super) fn new(adam: Adam) -> Learner {
        Learner { adam: Some(adam), worker: None }
    }

    /// The parameters after all lessons. Waits for one that runs.
    pub(super) fn adam(&mut self) -> &mut Adam {
        let worker = &self.worker;
        self.adam.get_or_insert_with(|| worker.as_ref().expect("one has them").learned())
    }

    /// Begins a lesson, after the one before it.
    pub(super) fn begin(&mut self, lesson: Lesson) {
        self.adam();
        if self.worker.is_none() {
            self.worker = Worker::start();
        }
        let mut adam = self.adam.take().expect("no lesson runs");
        match &self.worker {
            Some(worker) => worker.begin(adam, lesson),
            // The system allows no other thread.
            None => {
                lesson.learn(&Network::new(), &mut adam);
                self.adam = Some(adam);
            }
        }
    }
}

/// The thread of lessons.
struct Worker {
    /// `None` only while it is dropped: the thread ends when nothing more can come.
    lessons: Option<Sender<(Adam, Lesson)>>,
    learned: Receiver<Adam>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    fn start() -> Option<Worker> {
        let (lessons, next) = channel::<(Adam, Lesson)>();
        let (done, learned) = channel();
        let work = move || {
            let network = Network::new();
            for (mut adam, lesson) in next {
                lesson.learn(&network, &mut adam);
                if done.send(adam).is_err() {
                    break;
                }
            }
        };
        let thread = Builder::new().name("lessons".to_owned()).spawn(work).ok()?;
        Some(Worker { lessons: Some(lessons), learned, thread: Some(thread) })
    }

    fn begin(&self, adam: Adam, lesson: Lesson) {
        let lessons = self.lessons.as_ref().expect("it is not being dropped");
        lessons.send((adam, lesson)).expect("a lesson does not panic");
    }

    fn learned(&self) -> Adam {
        self.learned.recv().expect("a lesson does not panic")
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.lessons = None;
        if let Some(thread) = self.thread.take() {
            // A panic of a lesson was reported when its result was missing.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::network::{ACTED, OBSERVED};
    use super::*;

    fn lesson(number: u32) -> Lesson {
        let tick = |at: u32| Tick {
            action: [0.0; ACTED],
            observation: [0.1 * (number + at) as f32; OBSERVED],
            excess: 0.5,
            learners: 0xff,
            jump: None,
        };
        Lesson { ticks: (0..3).map(tick).collect(), bits: (7, number) }
    }

    #[test]
    fn lessons_on_their_thread_follow_each_other() {
        let network = Network::new();
        let mut expected = Adam::new(network.initial(1));
        let mut learner = Learner::new(Adam::new(network.initial(1)));
        for number in 0..4 {
            lesson(number).learn(&network, &mut expected);
            learner.begin(lesson(number));
            // Asked for in between, or not.
            if number == 1 {
                assert_eq!(learner.adam().vectors(), expected.vectors());
            }
        }
        assert_eq!(learner.adam().vectors(), expected.vectors());
        assert_eq!(learner.adam().steps(), 4);
    }
}
