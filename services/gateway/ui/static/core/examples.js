// Training examples that a reader collects in the chat, and the bodies of the jobs that learn from them.

/** Example of an answer's label, correction or preference; `before` are the messages in front of the answer. */
export const corrected = (before, rejected, text) => ({ kind: "corrected", before, rejected, text });
export const labelled = (before, text, good) => ({ kind: "labelled", before, text, good });
export const preferred = (before, text, rejected) => ({ kind: "preferred", before, text, rejected });

const said = (example, text) => ({ messages: [...example.before, { role: "assistant", content: text }] });
const isGood = (example) => example.kind !== "labelled" || example.good;

/** What each kind of job can learn from the examples. */
export const LEARNERS = {
  sft: {
    name: "SFT: say the good answers",
    examples: (all) => all.filter(isGood).map((example) => said(example, example.text)),
    missing: "SFT needs a corrected, liked or preferred answer.",
  },
  dpo: {
    name: "DPO: prefer good to bad",
    examples: (all) =>
      all
        .filter((example) => example.rejected && example.rejected !== example.text)
        .map((example) => ({ messages: example.before, chosen: example.text, rejected: example.rejected })),
    missing: "DPO needs a corrected answer, or one that you preferred to another.",
  },
  kto: {
    name: "KTO: thumbs up and down",
    examples: (all) => {
      const found = all.flatMap((example) => [
        { messages: example.before, completion: example.text, label: isGood(example) },
        ...(example.rejected ? [{ messages: example.before, completion: example.rejected, label: false }] : []),
      ]);
      return new Set(found.map((one) => one.label)).size === 2 ? found : [];
    },
    missing: "KTO needs good and bad answers, at least one of each.",
  },
};

/** Body of a job. Values that were left empty are the trainer's to choose. */
export function jobBody({ adapter, examples, epochs, rate, startFrom, attach, kind }) {
  const body = { adapter, examples, attach, metadata: { source: "dashboard" } };
  if (epochs) body.epochs = Number(epochs);
  if (rate) body.learning_rate = Number(rate);
  if (startFrom && kind !== "merge") body.start_from = startFrom;
  return body;
}
