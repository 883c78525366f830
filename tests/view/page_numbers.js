// Prints the weights, regions and rollouts that the page computes from the data on standard input.
const pale = require(process.argv[2]), data = JSON.parse(require("fs").readFileSync(0, "utf8"));
const out = { weights: [], rollout: [] };
data.stages.forEach((stage, s) => {
  for (const [i, j] of [[0, 0], [3, 5], [stage.h - 1, stage.w - 1]]) {
    stage.blocks.forEach((block, b) => {
      for (let n = 0; n < block.heads; n++) {
        const region = pale.region(block, stage, pale.kindOf(block, n), i, j);
        out.weights.push([s, b, i, j, n, [...pale.weights(block, stage, i, j, [n])], [...region]]);
      }
    });
    out.rollout.push([s, i, j, [...pale.rollout(data.stages, s, i, j)]]);
  }
});
console.log(JSON.stringify(out));
